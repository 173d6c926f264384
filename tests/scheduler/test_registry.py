from __future__ import annotations

import pytest

from daskinfer.exceptions import DeploymentExists, UnknownDeployment
from scheduler_plugins.deployment import (
    MAX_BREAKS,
    Deployment,
    ReplicaState,
    Version,
    WorkerFacts,
)
from scheduler_plugins.registry import MAX_RELOADS, Registry
from scheduler_plugins.routing import Route

A, B = "tcp://a:1", "tcp://b:1"


def worker(address=A, resources=None, devices=None, reasons=None):
    return WorkerFacts(
        address, devices or {"cpu": "cpu"}, reasons or {}, resources or {}
    )


def deployment(name="m", device="auto", resources=()):
    return Deployment(name, device, resources, "least-loaded", Route("1"))


def version(name="m"):
    return Version(name, "1", "digest")


def loaded(registry, address, name="m", digest="digest"):
    return registry.loaded(name, "1", address, digest, "cpu", "cpu", 0.1)


def test_a_deployment_is_loaded_on_every_worker_there_is():
    registry = Registry()
    for address in (A, B):
        assert registry.join(worker(address)) == []
    replicas = registry.add(deployment(), version())
    assert [r.address for r in replicas] == [A, B]
    assert {r.state for r in replicas} == {ReplicaState.LOADING}


def test_a_worker_that_joins_loads_what_is_deployed():
    registry = Registry()
    assert registry.add(deployment("m"), version("m")) == []
    assert registry.add(deployment("n"), version("n")) == []
    assert [(v.name, r.address) for v, r in registry.join(worker())] == [
        ("m", A),
        ("n", A),
    ]


def test_a_name_is_taken_once_and_the_error_says_how_to_replace_it():
    registry = Registry()
    registry.add(deployment(), version())
    with pytest.raises(DeploymentExists, match=r"'m'.*version '1'.*undeploy\(\)"):
        registry.add(deployment(), version())
    registry.remove("m")
    registry.add(deployment(), version())


def test_what_is_not_there_is_named_with_what_is():
    registry = Registry()
    with pytest.raises(UnknownDeployment, match="'m'; there is nothing"):
        registry.deployment("m")
    registry.add(deployment("n"), version("n"))
    with pytest.raises(UnknownDeployment, match="'m'; there is 'n'"):
        registry.remove("m")
    with pytest.raises(UnknownDeployment, match="'n' has no version '2'; it has '1'"):
        registry.version("n", "2")


def test_a_replica_is_ready_once_it_has_loaded_the_right_digest():
    registry = Registry()
    registry.join(worker(A))
    registry.join(worker(B))
    made = version()
    registry.add(deployment(), made)
    assert loaded(registry, A)
    assert not made.settled()
    for _ in range(MAX_RELOADS):
        load = made.replicas[B].load
        assert not loaded(registry, B, digest="other")
        # It is told to load it again, and what it says of the last time counts no more.
        assert made.replicas[B].state is ReplicaState.LOADING
        assert not registry.awaits("m", "1", B, load)
        assert not made.settled()
    assert not loaded(registry, B, digest="other")
    assert made.settled()
    assert [r.address for r in made.ready()] == [A]
    assert made.replicas[B].state is ReplicaState.FAILED
    assert made.replicas[B].reason == "it loaded digest other, not digest"


def test_reports_on_what_is_gone_are_ignored():
    registry = Registry()
    registry.join(worker())
    made = version()
    registry.add(deployment(), made)
    registry.leave(A)
    assert not loaded(registry, A)
    registry.failed("m", "1", A, "late", None)
    assert made.replicas == {}
    registry.remove("m")
    assert not loaded(registry, A)


def test_a_version_that_nobody_has_tried_is_not_settled():
    assert not version().settled()


@pytest.mark.parametrize(
    ("wanted", "facts", "refusal"),
    [
        ({}, {}, None),
        ({"device": "cpu"}, {}, None),
        (
            {"device": "npu"},
            {"reasons": {"npu": "torch_npu is not installed"}},
            "no npu device: torch_npu is not installed",
        ),
        ({"device": "cuda"}, {}, "no cuda device: it is not there"),
        ({"resources": (("NPU", 1),)}, {"resources": {"NPU": 2}}, None),
        ({"resources": (("NPU", 1),)}, {}, "it lacks NPU=1 (it has none)"),
        (
            {"resources": (("NPU", 2),)},
            {"resources": {"NPU": 1, "MEMORY": 5e9}},
            "it lacks NPU=2 (it has NPU=1, MEMORY=5e+09)",
        ),
    ],
)
def test_a_worker_is_refused_with_a_reason(wanted, facts, refusal):
    assert deployment(**wanted).refusal(worker(**facts)) == refusal


def test_a_worker_that_cannot_serve_gets_no_replica():
    registry = Registry()
    registry.join(worker(A))
    registry.join(worker(B, resources={"NPU": 1}))
    made = version()
    registry.add(deployment(resources=(("NPU", 1),)), made)
    assert list(made.replicas) == [B]


def test_the_problem_is_told_worker_by_worker():
    registry = Registry()
    registry.add(deployment(resources=(("NPU", 1),)), version())
    assert registry.problem("m") == "the cluster has no worker"
    registry.join(worker(A))
    registry.join(worker(B, resources={"NPU": 1}))
    assert registry.problem("m") == (
        f"no worker is ready: needs NPU=1; {A}: it lacks NPU=1 (it has none); "
        f"{B}: loading"
    )
    registry.failed("m", "1", B, "no module named 'net'", None)
    assert registry.problem("m").endswith(f"{B}: failed: no module named 'net'")
    loaded(registry, B)
    assert registry.problem("m") is None


def test_a_worker_that_comes_back_loads_again():
    registry = Registry()
    registry.add(deployment(), version())
    registry.join(worker())
    loaded(registry, A)
    registry.leave(A)
    assert registry.problem("m") == "the cluster has no worker"
    ((_, replica),) = registry.join(worker())
    assert replica.state is ReplicaState.LOADING


def test_representations_tell_what_is_there():
    registry = Registry()
    registry.join(worker())
    wanted, made = deployment(), version()
    registry.add(wanted, made)
    assert repr(wanted) == "<Deployment 'm' versions: ['1']>"
    assert repr(made) == "<Version 'm' '1' ready: 0>"


def test_a_worker_whose_device_is_broken_serves_nothing_and_says_why():
    registry = Registry()
    registry.join(worker(A))
    registry.join(worker(B))
    (a, _) = registry.add(deployment(), version())
    for address in (A, B):
        loaded(registry, address)
    registry.device_failed(A, "its device is broken: 507015", replaced=False)
    assert [r.address for r in registry.version("m").ready()] == [B]
    # A load that was under way there is not awaited any more.
    assert not registry.awaits("m", "1", A, 1)
    assert a.reason == "its device is broken: 507015"
    assert [r.address for r in registry.add(deployment("n"), version("n"))] == [B]
    registry.device_failed(B, "too", replaced=False)
    assert "tcp://a:1: failed: its device is broken: 507015" in registry.problem("m")
    assert "tcp://a:1: its device is broken: 507015" in registry.problem("n")
    # Under the same address, a process that is new.
    registry.leave(A)
    registry.join(worker(A))
    assert loaded(registry, A)
    assert registry.problem("m") is None
    registry.device_failed("tcp://unknown:1", "whatever", replaced=False)


def test_a_worker_whose_process_is_replaced_is_waited_for():
    registry = Registry()
    registry.join(worker(A))
    made = version()
    registry.add(deployment(), made)
    loaded(registry, A)
    registry.device_failed(A, "507015; its Nanny starts it anew", replaced=True)
    assert not made.ready() and not made.settled()
    assert "loading: 507015; its Nanny starts it anew" in registry.problem("m")
    registry.leave(A)
    ((_, replica),) = registry.join(worker(B), "its process is new")
    assert replica.doubt == "its process is new"
    # Of what is deployed later, the process is as good as any.
    (later,) = registry.add(deployment("n"), version("n"))
    assert later.doubt is None


def test_a_version_that_breaks_a_workers_device_each_time_is_not_loaded_again():
    registry = Registry()
    made = version()
    registry.add(deployment(), made)
    registry.add(deployment("n"), version("n"))
    for attempt in range(MAX_BREAKS):
        address = f"tcp://a:{attempt}"
        facts = worker(address)
        facts.seat = "tcp://nanny:1"
        assert [v.name for v, _ in registry.join(facts)] == ["m", "n"]
        registry.broke_device("m", "1", address, "507015", "a traceback")
        registry.device_failed(address, "507015", replaced=True)
        registry.leave(address)
    facts = worker(A)
    facts.seat = "tcp://nanny:1"
    assert [v.name for v, _ in registry.join(facts)] == ["n"]
    (replica,) = made.replicas.values()
    assert (replica.state, replica.failure) == (ReplicaState.FAILED, "a traceback")
    assert "broke 3 times" in replica.reason and "507015" in replica.reason
    assert made.settled()
    # Others may fare better.
    assert [v.name for v, _ in registry.join(worker(B))] == ["m", "n"]


# Room


def small(address=A, room=100):
    return WorkerFacts(address, {"cpu": "cpu"}, {}, {}, room={"cpu": room})


def of_size(nbytes, name="m"):
    return Version(name, "1", "digest", nbytes=nbytes)


def test_what_finds_no_room_is_cold():
    registry = Registry()
    registry.join(small())
    assert [r.address for r in registry.add(deployment("m"), of_size(60))] == [A]
    assert registry.add(deployment("n"), of_size(60, "n")) == []
    found = registry.version("n")
    assert found.cold == {A}
    assert found.replicas[A].state is ReplicaState.COLD
    # Nobody has tried it.
    assert not found.settled()
    # It was loaded by a worker that is gone, and will be by this one.
    found.loads[""] = 1
    assert found.settled()
    assert [r.address for r in registry.add(deployment("o"), of_size(40, "o"))] == [A]


def test_a_worker_that_joins_loads_what_it_has_room_for():
    registry = Registry()
    for name in "mno":
        registry.add(deployment(name), of_size(40, name))
    loads = registry.join(small())
    assert [version.name for version, _ in loads] == ["m", "n"]
    assert registry.version("o").cold == {A}
    registry.leave(A)
    assert registry.version("o").cold == set()


def test_room_is_counted_by_kind_of_device():
    registry = Registry()
    devices = {"npu": "npu", "cpu": "cpu"}
    room = {"npu": 50, "cpu": 50}
    registry.join(WorkerFacts(A, devices, {}, {}, room=room))
    assert registry.add(deployment("m", device="npu"), of_size(50, "m"))
    assert registry.add(deployment("n", device="cpu"), of_size(50, "n"))
    assert not registry.add(deployment("o", device="auto"), of_size(1, "o"))


def test_what_was_evicted_is_loaded_by_a_new_number():
    registry = Registry()
    registry.join(small())
    (replica,) = registry.add(deployment(), of_size(60))
    first = replica.load
    assert loaded(registry, A)
    found = registry.version("m")
    registry.memory.evict(found, A)
    assert (replica.state, found.cold, found.evictions) == (ReplicaState.COLD, {A}, 1)
    assert not registry.awaits("m", "1", A, first)
    registry.memory.parked("m", "1", A, True)
    assert replica.is_parked
    assert registry.memory.reload(found, A) is replica
    assert (replica.state, found.cold) == (ReplicaState.LOADING, set())
    assert not replica.is_parked
    assert registry.awaits("m", "1", A, replica.load)


def test_a_load_that_fails_where_it_was_ready_before_is_tried_again():
    registry = Registry()
    registry.join(small())
    (replica,) = registry.add(deployment(), of_size(60))
    assert loaded(registry, A)
    replica.since = 1.0
    found = registry.version("m")
    for _ in range(MAX_RELOADS):
        registry.memory.evict(found, A)
        registry.memory.reload(found, A)
        registry.failed("m", "1", A, "no memory", None)
        assert (replica.state, replica.reason) == (ReplicaState.COLD, "no memory")
    registry.memory.reload(found, A)
    registry.failed("m", "1", A, "no memory", None)
    assert replica.state is ReplicaState.FAILED


def test_a_cold_version_is_no_problem_unless_it_cannot_be_loaded():
    registry = Registry()
    registry.join(small())
    registry.add(deployment("m"), of_size(60))
    registry.add(deployment("n"), of_size(60, "n"))
    assert registry.can_answer("n", "1")
    assert registry.problem("n") == f"no worker is ready: {A}: cold"
    registry.version("n").replicas[A].reason = "it is too large"
    assert not registry.can_answer("n", "1")


def test_a_device_that_broke_loads_nothing_that_was_cold():
    registry = Registry()
    registry.join(small())
    registry.add(deployment("m"), of_size(60))
    registry.add(deployment("n"), of_size(60, "n"))
    registry.device_failed(A, "it broke", replaced=False)
    assert registry.version("n").cold == set()
    assert registry.version("n").replicas[A].state is ReplicaState.FAILED
