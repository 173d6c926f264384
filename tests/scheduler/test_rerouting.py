"""Requests that wait when another version takes over."""

from __future__ import annotations

from typing import Any

from daskinfer import RetryPolicy
from daskinfer.policy import BatchPolicy
from scheduler_plugins.deployment import Deployment, Version
from scheduler_plugins.line import Batch, Line
from scheduler_plugins.request import Request
from scheduler_plugins.routing import Route
from tests.scheduler.bench import A, Bench, settle
from tests.scheduler.virtual import on_loop


class TwoVersions:
    """Version 2 stands beside version 1, and takes over when a test says so."""

    def __init__(self) -> None:
        self.bench = Bench(place=self.place)
        self.dispatcher = self.bench.dispatcher
        policy = BatchPolicy(max_batch_size=1)
        self.old = self.bench.open(policy=policy)
        deployment = Deployment("m", "cpu", (), "least-loaded", Route("1"))
        self.new = self.dispatcher.lines.open(
            deployment, Version("m", "2", "digest", policy=policy)
        )
        self.dispatcher.device_ready("m", "2", A, "cpu", [(1, 1.0)])
        self.active = self.old

    def place(self, request: Request, line: Line) -> Line | None:
        if request.pinned == "gone":
            return None
        return self.old if request.pinned == "1" else self.active

    def switch(self) -> None:
        self.active = self.new
        self.dispatcher.waiting.reroute("m")


def waiting(line: Line) -> list[Any]:
    requests = line.queue.requests()
    return [r.key for r in sorted(requests, key=lambda request: request.order)]


@on_loop
async def test_they_go_along_and_keep_their_places():
    two = TwoVersions()
    made = two.bench.enqueue(two.old, *"abcdef", arrived=1.0)
    made[2].pinned, made[3].pinned = "1", "gone"
    two.bench.enqueue(two.new, "late", arrived=2.0)
    two.bench.enqueue(two.new, "early", arrived=0.5)
    two.switch()
    assert waiting(two.new) == ["early", "a", "b", "e", "f", "late"]
    assert waiting(two.old) == ["c"]
    assert not made[3].waiting
    await settle()
    sent = {m["keys"][0]: m["version"] for _, m in two.bench.runs}
    assert sent == {"c": "1", "early": "2"}


@on_loop
async def test_batches_under_way_stay_and_what_comes_back_goes_along():
    two = TwoVersions()
    made = two.bench.enqueue(two.old, "a", "b")
    await settle()
    (address, message), *_ = two.bench.runs
    assert (address, message["version"], message["keys"]) == (A, "1", ["a"])
    two.switch()
    assert made[0].batch == message["batch"] and two.old.in_flight
    # Its worker could not run it: it waits for the version that answers now.
    two.dispatcher.running.unassign(made[0])
    two.dispatcher.waiting.requeue(made[0], two.old)
    assert waiting(two.new)[0] == "a" and not waiting(two.old)


@on_loop
async def test_those_that_are_held_back_go_along():
    two = TwoVersions()
    two.old.retry = RetryPolicy(backoff=1000, max_backoff=1000)
    (request,) = two.bench.enqueue(two.old, "a")
    batch = Batch("m-1", two.old, two.old.devices[A], {"a": 1}, {}, 1, 0.0)
    two.dispatcher.recovery.timed_out(batch, [request])
    assert request.delayed and two.old.delayed == 1
    two.switch()
    assert (request.delayed, two.old.delayed, two.new.delayed) == (False, 0, 0)
    assert waiting(two.new) == ["a"]
    two.dispatcher.close("m", "1")
    assert request.waiting
