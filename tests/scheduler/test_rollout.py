"""How one version takes over from another, without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.exceptions import (
    InferenceError,
    NoPreviousVersion,
    NoUpdate,
    UnknownDeployment,
    UpdateInProgress,
    VersionExists,
    VersionNotReady,
)
from daskinfer.policy import BatchPolicy
from scheduler_plugins import rollout
from scheduler_plugins.deployment import Deployment, ReplicaState, Version, WorkerFacts
from scheduler_plugins.registry import MAX_RELOADS, Registry
from scheduler_plugins.rollout import Drain, Phase, Reroute, Unload, Update
from scheduler_plugins.routing import Route

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"


class World:
    """A registry, and workers that do what they are told when a test lets them.

    Attributes
    ----------
    memory
        What is loaded on each worker: its digest, by label.
    inbox
        What each worker was told and has not done.
    in_flight
        Versions that have batches under way.
    reached
        Which part of the workers was ready when an update had come as far as it goes.
    """

    def __init__(self, *addresses: str) -> None:
        self.registry = Registry()
        self.memory: dict[str, dict[str, str]] = {}
        self.inbox: dict[str, list[tuple[str, str, int]]] = {}
        self.in_flight: set[str] = set()
        self.actions: list[rollout.Action] = []
        self.updates: list[Update] = []
        self.reached: dict[str, float] = {}
        self.deployment = Deployment("m", "auto", (), "least-loaded", Route("1"))
        version = Version("m", "1", "digest of 1")
        self.registry.add(self.deployment, version)
        for address in addresses:
            self.join(address)
            self.work(address)

    @property
    def workers(self) -> list[WorkerFacts]:
        return list(self.registry.workers.values())

    def join(self, address: str) -> None:
        if address in self.registry.workers:
            return
        self.memory[address], self.inbox[address] = {}, []
        facts = WorkerFacts(address, {"cpu": "cpu"}, {}, {}, seat=address)
        for version, replica in self.registry.join(facts):
            self.inbox[address].append(("load", version.version, replica.load))
        self.settle()

    def leave(self, address: str) -> None:
        if address in self.registry.workers:
            self.registry.leave(address)
            del self.memory[address], self.inbox[address]
            self.settle()

    def update(self, label: str, **about: object) -> Update:
        update = Update(label, **about)  # type: ignore[arg-type]
        version = Version("m", label, f"digest of {label}")
        rollout.begin(self.deployment, update, version)
        self.updates.append(update)
        for replica in self.registry.assign(self.deployment, version):
            self.inbox[replica.address].append(("load", label, replica.load))
        self.settle()
        return update

    def work(self, address: str, how: str = "load") -> None:
        """Let a worker do the next thing that it was told to."""
        if not self.inbox.get(address):
            return
        what, label, load = self.inbox[address].pop(0)
        if what == "unload":
            self.memory[address].pop(label, None)
        elif how == "fail":
            if self.registry.awaits("m", label, address, load):
                self.registry.failed("m", label, address, "no disk", None)
        else:
            digest = f"digest of {label}" if how == "load" else "other"
            self.memory[address][label] = digest
            self.report(address, label, load, digest)
        self.settle()

    def report(self, address: str, label: str, load: int, digest: str) -> None:
        """A worker says that it has loaded something."""
        if self.registry.awaits("m", label, address, load):
            if not self.registry.loaded("m", label, address, digest, "cpu", "cpu", 0.1):
                replica = self.deployment.versions[label].replicas[address]
                if replica.state is ReplicaState.LOADING:
                    self.inbox[address].append(("load", label, replica.load))
        elif not self.registry.wants("m", label, address):
            self.inbox[address].append(("unload", label, 0))

    def settle(self) -> None:
        update = self.deployment.update
        self.enact(rollout.settle(self.deployment, self.workers))
        reached = (Phase.READY, Phase.CANARY, Phase.ACTIVE)
        if update is not None and update.phase in reached:
            self.reached.setdefault(update.version, self._ready_share(update))
            assert self.reached[update.version] >= max(update.min_ready, 1e-9)

    def _ready_share(self, update: Update) -> float:
        ready = len(self.deployment.versions[update.version].ready())
        return ready / max(len(self.workers), 1)

    def enact(self, actions: list[rollout.Action]) -> None:
        for action in actions:
            self.actions.append(action)
            if isinstance(action, Drain):
                self.ended(action.version.version)
            elif isinstance(action, Unload):
                for address in action.version.replicas:
                    self.inbox[address].append(("unload", action.version.version, 0))

    def ended(self, label: str) -> None:
        if label not in self.in_flight:
            self.enact(rollout.drained(self.deployment, label))

    def change(self, change: object, *args: object) -> None:
        self.enact(change(self.deployment, *args))  # type: ignore[operator]

    def work_all(self) -> None:
        while any(self.inbox.values()):
            for address in list(self.inbox):
                self.work(address)

    def check(self) -> None:
        """What must be so at any time."""
        deployment = self.deployment
        assert deployment.active in deployment.versions
        assert deployment.active not in deployment.leaving
        assert deployment.previous != deployment.active
        canary = deployment.route.canary
        if canary is not None:
            assert deployment.update is not None
            assert (deployment.update.version, Phase.CANARY) == (
                canary,
                deployment.update.phase,
            )
        wanted = {v.version for v in deployment.resident()}
        assert wanted | deployment.leaving == set(deployment.versions)
        assert not wanted & deployment.leaving
        for version in deployment.versions.values():
            assert version.replicas.keys() <= self.registry.workers.keys()
            for replica in version.ready():
                assert self.memory[replica.address][version.version] == version.digest


def test_the_old_version_answers_until_all_are_ready_with_the_new_one():
    world = World(A, B)
    update = world.update("2")
    world.work(A)
    assert (world.deployment.active, update.phase) == ("1", Phase.LOADING)
    assert world.actions == []
    world.work(B)
    assert (world.deployment.active, update.phase) == ("2", Phase.ACTIVE)
    assert (world.deployment.previous, world.deployment.update) == ("1", None)
    assert world.actions == [Reroute("m")]
    assert world.memory == {A: dict(one | two), B: dict(one | two)}


one, two = {"1": "digest of 1"}, {"2": "digest of 2"}


@pytest.mark.parametrize(
    ("min_ready", "needed"), [(0.0, 1), (0.3, 1), (0.34, 2), (0.7, 3), (1.0, 3)]
)
def test_a_part_of_the_workers_may_be_enough_but_one_at_least(min_ready, needed):
    world = World(A, B, C)
    world.update("2", min_ready=min_ready)
    for count, address in enumerate((A, B, C), 1):
        world.work(address)
        assert (world.deployment.active == "2") == (count >= needed)


def test_one_worker_that_fails_keeps_the_old_version_everywhere():
    world = World(A, B, C)
    update = world.update("2")
    world.work(A)
    world.work(B, "fail")
    assert update.phase is Phase.FAILED
    assert "on 1 worker of 3" in update.reason and f"{B}: no disk" in update.reason
    assert "version '1' stays active" in update.reason
    world.work_all()
    assert world.deployment.active == "1" and list(world.deployment.versions) == ["1"]
    assert all(memory == one for memory in world.memory.values())
    # It has never answered, so the label is free for what is better.
    world.update("2")
    world.work_all()
    assert world.deployment.active == "2"


def test_failures_that_leave_enough_workers_do_not_matter():
    world = World(A, B, C)
    update = world.update("2", min_ready=0.6)
    world.work(A, "fail")
    assert update.phase is Phase.LOADING
    world.work_all()
    assert update.phase is Phase.ACTIVE
    assert world.deployment.versions["2"].replicas[A].state is ReplicaState.FAILED


def test_a_wrong_digest_is_loaded_again_and_counts_as_a_failure_at_last():
    world = World(A)
    update = world.update("2")
    for _ in range(MAX_RELOADS):
        world.work(A, "wrong")
        assert update.phase is Phase.LOADING
    world.work(A, "wrong")
    assert update.phase is Phase.FAILED
    assert "it loaded digest other, not digest of 2" in update.reason
    world = World(A)
    update = world.update("2")
    world.work(A, "wrong")
    world.work(A)
    assert update.phase is Phase.ACTIVE
    assert world.deployment.versions["2"].replicas[A].reason is None


def test_one_update_at_a_time_and_one_version_of_a_label():
    world = World(A)
    world.update("2")
    with pytest.raises(UpdateInProgress, match=r"'m' .* to version '2' .*abort\(\)"):
        world.update("3")
    world.work_all()
    for label in ("1", "2"):
        with pytest.raises(VersionExists, match=f"'m' has a version '{label}'"):
            world.update(label)
    world.update("3")
    world.work_all()
    with pytest.raises(VersionExists, match="'m' had a version '1'"):
        world.update("1")
    with pytest.raises(ValueError, match=r"batch_dim must stay 0, .* not become None"):
        rollout.begin(
            world.deployment,
            Update("4"),
            Version("m", "4", "d", policy=BatchPolicy(batch_dim=None)),
        )
    assert world.deployment.update is None


def test_what_is_older_than_the_previous_version_goes_after_its_last_batch():
    world = World(A)
    world.update("2")
    world.work_all()
    world.in_flight = {"1"}
    world.update("3")
    world.work_all()
    assert world.deployment.leaving == {"1"}
    with pytest.raises(UnknownDeployment, match="version '1' of 'm' was retired"):
        world.registry.version("m", "1")
    assert world.memory[A].keys() == {"1", "2", "3"}
    world.in_flight.clear()
    world.ended("1")
    world.work_all()
    assert world.memory[A].keys() == {"2", "3"}
    with pytest.raises(UnknownDeployment, match=r"retired; there is '2', '3'\. Use a"):
        world.registry.version("m", "1")


def test_the_previous_version_may_go_at_once():
    world = World(A)
    world.update("2", keeps=False)
    world.work_all()
    assert world.memory[A].keys() == {"2"}
    with pytest.raises(NoPreviousVersion, match="no version before '2'"):
        world.change(rollout.rollback)


def test_rolling_back_and_forward():
    world = World(A)
    with pytest.raises(NoPreviousVersion):
        world.change(rollout.rollback)
    world.update("2")
    world.work_all()
    for active, previous in (("1", "2"), ("2", "1")):
        world.change(rollout.rollback)
        assert world.deployment.active == active
        assert world.deployment.previous == previous
    world.leave(A)
    with pytest.raises(NoPreviousVersion, match="no worker is ready for version '1'"):
        world.change(rollout.rollback)


def test_a_version_that_is_to_be_promoted_waits():
    world = World(A, B)
    update = world.update("2", waits=True)
    with pytest.raises(VersionNotReady, match=f"2 more workers.*{A} is loading"):
        world.change(rollout.promote, "2", world.workers)
    world.work_all()
    assert (world.deployment.active, update.phase) == ("1", Phase.READY)
    with pytest.raises(NoUpdate, match=r"no version '3' to promote.*to version '2'"):
        world.change(rollout.promote, "3", world.workers)
    world.change(rollout.promote, None, world.workers)
    assert world.deployment.active == "2"
    with pytest.raises(NoUpdate, match="no update is under way"):
        world.change(rollout.promote, "2", world.workers)


def test_a_canary_answers_a_share_until_it_is_decided():
    world = World(A)
    update = world.update("2", share=0.25)
    assert world.deployment.route == Route("1")
    with pytest.raises(VersionNotReady, match="is being loaded"):
        world.change(rollout.share, "2", 0.5)
    world.work_all()
    assert update.phase is Phase.CANARY
    assert world.deployment.route == Route("1", "2", 0.25)
    world.change(rollout.share, "2", 0.5)
    assert world.deployment.route == Route("1", "2", 0.5)
    world.change(rollout.share, "2", 0.0)
    assert (world.deployment.route, update.phase) == (Route("1"), Phase.READY)
    world.change(rollout.share, "2", 0.5)
    world.change(rollout.abort, "no good")
    assert world.deployment.route == Route("1")
    assert (update.phase, update.reason) == (Phase.ABORTED, "no good")
    world.work_all()
    assert world.memory[A] == one
    # It has answered, so what else has its label would be mistaken for it.
    with pytest.raises(VersionExists):
        world.update("2")
    with pytest.raises(NoUpdate):
        world.change(rollout.abort, "again")


def test_a_worker_that_joins_during_an_update_is_waited_for():
    world = World(A)
    update = world.update("2")
    world.join(B)
    # What is active comes first.
    assert [label for _, label, _ in world.inbox[B]] == ["1", "2"]
    world.work(A)
    assert update.phase is Phase.LOADING
    world.work_all()
    assert update.phase is Phase.ACTIVE
    assert world.memory[B].keys() == {"1", "2"}


def test_the_last_ready_worker_dies_during_an_update():
    world = World(A, B)
    update = world.update("2")
    world.work(A)
    world.leave(A)
    assert update.phase is Phase.LOADING
    world.leave(B)
    assert update.phase is Phase.LOADING
    world.join(C)
    world.work_all()
    assert (update.phase, world.deployment.active) == (Phase.ACTIVE, "2")


def test_a_worker_whose_death_leaves_only_failed_ones_ends_the_update():
    world = World(A, B)
    update = world.update("2", min_ready=0.5)
    world.work(A, "fail")
    assert update.phase is Phase.LOADING
    world.leave(B)
    assert update.phase is Phase.FAILED


def test_reports_that_disagree_with_what_was_asked_for():
    world = World(A)
    # Nobody asked for this one: the worker lets go of it.
    world.memory[A]["7"] = "whatever"
    world.report(A, "7", 99, "whatever")
    world.work_all()
    assert world.memory[A] == one
    # This was asked for once; another load is under way, and decides.
    world.update("2")
    (_, _, load) = world.inbox[A][0]
    world.report(A, "2", load - 1, "digest of 2")
    assert not world.deployment.versions["2"].ready()
    world.work_all()
    assert world.deployment.active == "2"


ADDRESSES = [f"tcp://{name}:1" for name in "abcd"]
UPDATE = st.tuples(
    st.just("update"),
    st.sampled_from([0.0, 0.5, 1.0]),  # min_ready
    st.sampled_from(["at once", "at once", "manual", "canary"]),
    st.booleans(),  # keeps
)
ON_A_WORKER = st.tuples(
    st.sampled_from(["load", "load", "fail", "wrong", "join", "leave"]),
    st.sampled_from(ADDRESSES),
)
DECIDE = st.tuples(
    st.sampled_from(["promote", "abort", "rollback", "share", "busy", "idle"])
)
STEPS = st.lists(
    st.one_of(UPDATE, ON_A_WORKER, ON_A_WORKER, DECIDE, st.just(("load all",))),
    min_size=20,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_whatever_happens_it_converges(steps):
    world = World(A)
    labels = iter(range(2, 1000))
    for what, *how in steps:
        try:
            if what == "update":
                min_ready, kind, keeps = how
                world.update(
                    str(next(labels)),
                    min_ready=min_ready,
                    keeps=keeps,
                    waits=kind == "manual",
                    share=0.1 if kind == "canary" else 0.0,
                )
            elif what == "join":
                world.join(*how)
            elif what == "leave":
                world.leave(*how)
            elif what == "promote":
                world.change(rollout.promote, None, world.workers)
            elif what == "abort":
                world.change(rollout.abort, "given up")
            elif what == "rollback":
                world.change(rollout.rollback)
            elif what == "share":
                update = world.deployment.update
                world.change(rollout.share, update and update.version, 0.5)
            elif what == "load all":
                world.work_all()
            elif what == "busy":
                world.in_flight = set(world.deployment.versions)
            elif what == "idle":
                world.in_flight.clear()
            else:
                world.work(*how, what)
        except (NoUpdate, NoPreviousVersion, VersionNotReady, UpdateInProgress):
            pass
        world.check()
    # From here on all goes well.
    world.in_flight.clear()
    for label in list(world.deployment.leaving):
        world.ended(label)
    world.join(A)
    world.work_all()
    world.check()
    deployment = world.deployment
    assert not deployment.leaving
    for update in world.updates:
        if update is not deployment.update:
            assert update.phase.has_ended
    if deployment.update is not None:
        # With nothing left to wait for but a decision.
        assert deployment.update.phase in (Phase.READY, Phase.CANARY)
    for address, memory in world.memory.items():
        failed = {
            version.version
            for version in deployment.versions.values()
            if version.replicas[address].state is ReplicaState.FAILED
        }
        assert memory.keys() - failed == set(deployment.versions) - failed
        assert not memory.keys() - deployment.versions.keys()


def test_errors_are_the_engines_own():
    for kind in (NoUpdate, NoPreviousVersion, VersionExists, VersionNotReady):
        assert issubclass(kind, InferenceError)
