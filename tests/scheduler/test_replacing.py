"""Workers whose device is broken, and the processes that come in their place."""

from __future__ import annotations

from typing import Any

import pytest

from daskinfer import protocol
from daskinfer.policy import BatchPolicy
from scheduler_plugins.deployment import Deployment, ReplicaState, Version, WorkerFacts
from scheduler_plugins.registry import Registry
from scheduler_plugins.replacing import Replacing
from scheduler_plugins.routing import Route
from tests.scheduler.bench import A, B, Bench, settle
from tests.scheduler.virtual import on_loop

SEAT = "tcp://nanny:1"


class Setup:
    """A version that is served by one worker."""

    def __init__(self, nanny: bool = True) -> None:
        self.bench = Bench().follow()
        self.line = self.bench.open(
            workers=(A,), seconds=1e-3, policy=BatchPolicy(max_batch_size=2)
        )
        tasks: Any = self.bench.tasks
        tasks.has_nanny = lambda address: nanny
        self.registry = Registry()
        self.version = Version("m", "1", "digest")
        deployment = Deployment("m", "cpu", (), "least-loaded", Route("1"))
        self.registry.add(deployment, self.version)
        self.join(A)
        self.sent: list[tuple[str, Any]] = []
        self.replacing = Replacing(
            tasks, self.registry, self.bench.dispatcher, self.send
        )

    def join(self, address: str, doubt: str | None = None) -> int:
        facts = WorkerFacts(address, {"cpu": "cpu"}, {}, {}, SEAT)
        loads = self.registry.join(facts, doubt)
        for _, replica in loads:
            self.registry.loaded("m", "1", address, "digest", "cpu", "cpu", 0.1)
            assert replica.state is ReplicaState.READY
        return len(loads)

    def send(self, address: str, message: Any) -> None:
        self.sent.append((address, message["op"]))


@on_loop
async def test_what_waits_at_a_broken_device_comes_back_uncharged():
    setup = Setup()
    requests = setup.bench.enqueue(setup.line, *range(4))
    await settle()
    assert len(setup.bench.batches) == 2
    setup.bench.answer(0, keys=[0], struck=[1], broken="507015")
    setup.replacing.device_failed(A, "507015")
    assert [r.charges for r in requests] == [0, 1, 0, 0]
    assert sorted(setup.bench.tasks.released) == [1, 2, 3]
    # What it says of the other batch changes nothing any more.
    setup.bench.answer(1, keys=[], broken="507015")
    setup.replacing.device_failed(A, "507015")
    assert [r.charges for r in requests] == [0, 1, 0, 0]
    assert sorted(setup.bench.tasks.released) == [1, 2, 3]
    assert setup.sent == [(A, protocol.REPLACE)]
    setup.bench.dispatcher.clear()


@pytest.mark.parametrize(
    ("nanny", "state", "told"),
    [
        (True, ReplicaState.LOADING, "its Nanny starts it anew"),
        (False, ReplicaState.FAILED, "it has no Nanny: start it anew"),
    ],
)
def test_a_broken_device_is_out_of_service_with_or_without_a_nanny(
    nanny: bool, state: ReplicaState, told: str
):
    @on_loop
    async def check() -> None:
        setup = Setup(nanny)
        setup.replacing.device_failed(A, "507015")
        (replica,) = setup.version.replicas.values()
        assert (replica.state, replica.reason) == (
            state,
            f"its device is broken: 507015; {told}",
        )
        assert not setup.line.devices
        assert len(setup.sent) == nanny
        await settle()

    check()


@on_loop
async def test_the_process_in_its_place_is_doubted_once():
    setup = Setup()
    setup.replacing.device_failed(A, "507015")
    setup.registry.leave(A)
    doubt = setup.replacing.came(SEAT)
    assert doubt is not None and "507015" in doubt
    assert setup.join(B, doubt) == 1
    assert setup.version.replicas[B].doubt == doubt
    assert setup.replacing.came(SEAT) is None
    assert setup.replacing.came("tcp://other:1") is None
    await settle()


@on_loop
async def test_a_version_that_breaks_the_device_while_it_is_loaded_is_given_up():
    setup = Setup()

    def fail(address: str) -> None:
        setup.replacing.loading_failed("m", "1", address, "507015", "a traceback")

    address = A
    for attempt in range(2):
        fail(address)
        setup.registry.leave(address)
        address = f"tcp://new-{attempt}:1"
        assert setup.join(address, setup.replacing.came(SEAT)) == 1
    fail(address)
    assert [op for _, op in setup.sent] == [protocol.REPLACE] * 3
    setup.registry.leave(address)
    assert setup.join(B) == 0
    assert setup.version.replicas[B].failure == "a traceback"
    assert "tcp://b:1: failed: its device broke 3 times" in setup.registry.problem("m")
    await settle()


@on_loop
async def test_a_device_that_hangs_is_replaced_under_a_nanny():
    setup = Setup()
    (request,) = setup.bench.enqueue(setup.line, "k")
    await settle()
    setup.replacing.hung(A, "batch m-1 runs on")
    assert setup.sent == [(A, protocol.REPLACE)]
    (replica,) = setup.version.replicas.values()
    assert (
        replica.state is ReplicaState.LOADING and "hangs: batch m-1" in replica.reason
    )
    assert request.charges == 0 and request.waiting and not setup.line.devices
    assert "its process is new" in setup.replacing.came(SEAT)


@on_loop
async def test_without_a_nanny_a_device_that_hangs_is_waited_for():
    setup = Setup(nanny=False)
    setup.bench.enqueue(setup.line, "k")
    await settle()
    setup.replacing.hung(A, "batch m-1 runs on")
    assert not setup.sent and A in setup.line.devices
