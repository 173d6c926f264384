"""Requests under which workers die: who is charged, and how they are found out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from daskinfer import RetryPolicy
from daskinfer.exceptions import BatchTimeout, DeviceError, WorkerLost
from daskinfer.policy import BatchPolicy
from scheduler_plugins.constraint import Constraint
from scheduler_plugins.line import Batch, Line
from tests.scheduler.bench import A, B, Bench, come, settle
from tests.scheduler.virtual import on_loop


def die(bench: Bench, index: int) -> None:
    """A worker dies with a batch."""
    bench.lose(bench.runs[index][0])


def break_device(bench: Bench, index: int, struck: list[Any] | None = None) -> None:
    """The device breaks under a batch; its worker is there until it is replaced."""
    address, message = bench.runs[index]
    requests = {
        key: (request, batch.line)
        for batch in bench.dispatcher.running.batches.values()
        if batch.device.name == address
        for key, request in batch.requests.items()
    }
    released = len(bench.tasks.released)
    if struck is None:
        struck = message["keys"]
    release = bench.tasks.release_running

    def park(keys: Any, stimulus_id: str) -> None:
        # What Dask's transitions make the plugin do.
        release(keys, stimulus_id)
        for key in keys:
            bench.dispatcher.waiting.enqueue(*requests[key])

    with patch.object(bench.tasks, "release_running", park):
        bench.answer(index, keys=[], struck=struck, broken="error code is 507015")
        bench.dispatcher.device_failed(address)
    for line in bench.dispatcher.lines.values():
        for request in line.queue.requests():
            if request.key in bench.tasks.failed:
                bench.dispatcher.waiting.discard(request)
    # Everybody once.
    back = bench.tasks.released[released:]
    assert sorted(map(str, back)) == sorted(map(str, requests))
    bench.tasks.workers.remove(address)


async def run_with_deadly(
    bench: Bench,
    line: Line,
    deadly: set[Any],
    kill: Callable[[Bench, int], None] = die,
    limit: int = 2000,
) -> int:
    """Answer batches until nothing is left; those with a deadly one kill. Count."""
    deaths = 0
    for _ in range(limit):
        await settle()
        running = list(bench.dispatcher.running.batches.values())
        if not running:
            return deaths
        batch = running[0]
        first = next(b for b in running if b.device is batch.device)
        index = [m["batch"] for _, m in bench.runs].index(first.batch_id)
        if deadly & set(first.requests):
            deaths += 1
            kill(bench, index)
            bench.join(f"tcp://new-{deaths}:1")
        else:
            bench.answer(index)
            bench.answered += list(bench.runs[index][1]["keys"])
    pytest.fail("it never ends")


def expected_deaths(n: int, attempts: int = 3) -> int:
    """As the documentation has it."""
    levels = math.ceil(math.log(n, 8) - 1e-9)
    return max(attempts, levels + min(2, attempts))


@pytest.mark.parametrize("n", [1, 2, 8, 9, 64, 65, 200])
@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
@on_loop
async def test_a_deadly_request_is_found_in_few_deaths(n: int, attempts: int):
    bench = Bench()
    line = bench.open(
        workers=(A, B), policy=BatchPolicy(max_batch_size=256), seconds=1e-3
    )
    line.retry = RetryPolicy(max_attempts=attempts)
    poison = n - 1  # in the larger part, where parts are not equal
    bench.enqueue(line, *range(n))
    deaths = await run_with_deadly(bench, line, {poison})
    assert deaths == expected_deaths(n, attempts)
    assert {type(e) for e in bench.tasks.failed.values()} == {WorkerLost}
    assert list(bench.tasks.failed) == [poison]
    error = bench.tasks.failed[poison]
    assert (error.key, error.name, error.version) == (poison, "m", "1")
    assert error.attempts == deaths
    # Each of the others exactly once.
    assert sorted(bench.answered) == [i for i in range(n) if i != poison]


@on_loop
async def test_several_deadly_requests_among_many():
    bench = Bench()
    line = bench.open(
        workers=(A, B), policy=BatchPolicy(max_batch_size=64), seconds=1e-3
    )
    bench.enqueue(line, *range(64))
    poison = {3, 4, 40}
    deaths = await run_with_deadly(bench, line, poison)
    assert set(bench.tasks.failed) == poison
    assert sorted(bench.answered) == sorted(set(range(64)) - poison)
    assert deaths <= 1 + 3 * (expected_deaths(64) - 1)


@on_loop
async def test_what_was_queued_behind_is_not_charged():
    bench = Bench()
    line = bench.open(policy=BatchPolicy(max_batch_size=1), seconds=1e-3)
    first, second = bench.enqueue(line, "first", "second")
    await settle()
    assert [keys for _, keys in bench.batches] == [["first"], ["second"]]
    bench.lose(A)
    assert (first.charges, first.solo, first.bystander) == (1, 1, 0)
    assert (second.charges, second.solo, second.bystander) == (0, 0, 1)
    assert first.group is not None and second.group is None


@on_loop
async def test_a_bystander_of_two_losses_is_suspected_too():
    """The answer of the one before it may have died with the worker, twice."""
    bench = Bench()
    line = bench.open(seconds=1e-3, policy=BatchPolicy(max_batch_size=1))
    workers = [A, B]
    bench.enqueue(line, "before")
    (request,) = bench.enqueue(line, "deadly", arrived=1.0)
    for i, address in enumerate(workers):
        await settle()
        assert bench.batches[-1] == (address, ["deadly"])
        bench.lose(address)
        assert (request.charges, request.bystander) == (0, i + 1)
        for waiting in line.queue.requests():
            if waiting is not request:
                bench.dispatcher.waiting.discard(waiting)
        bench.enqueue(line, f"before-{i}", arrived=-1.0)
        bench.join([B, "tcp://c:1"][i])
    assert request.group is not None
    # From now on whatever happens to it is its own doing.
    await settle()
    assert bench.batches[-1] == ("tcp://c:1", ["before-1"])
    bench.answer()
    await settle()
    assert bench.batches[-1] == ("tcp://c:1", ["deadly"])
    bench.lose("tcp://c:1")
    assert request.charges == 1


@on_loop
async def test_nobody_is_charged_for_a_worker_that_leaves_on_purpose():
    bench = Bench()
    line = bench.open(policy=BatchPolicy(max_batch_size=1))
    requests = bench.enqueue(line, 1, 2)
    await settle()
    bench.lose(A, expected=True)
    for request in requests:
        assert (request.charges, request.bystander, request.group) == (0, 0, None)
        assert request.waiting


@on_loop
async def test_retries_of_the_user_are_honoured_exactly():
    bench = Bench()
    line = bench.open(workers=(A, B), seconds=1e-3)
    bench.tasks.retries["poison"] = 4
    bench.enqueue(line, "poison")
    assert await run_with_deadly(bench, line, {"poison"}) == 3 + 4
    assert isinstance(bench.tasks.failed["poison"], WorkerLost)


@on_loop
async def test_without_a_retry_on_lost_workers_batch_mates_are_answered_all_the_same():
    bench = Bench()
    line = bench.open(workers=(A, B), seconds=1e-3)
    line.retry = RetryPolicy(retry_on=[BatchTimeout])
    bench.enqueue(line, *range(8))
    assert await run_with_deadly(bench, line, {5}) == 2
    assert list(bench.tasks.failed) == [5]
    assert sorted(bench.answered) == [0, 1, 2, 3, 4, 6, 7]


@on_loop
async def test_an_isolated_request_gets_its_turn_under_full_load():
    """An idle device never comes by itself; new requests must not pass it by."""
    bench = Bench()
    line = bench.open(
        workers=(A, B), seconds=1e-3, policy=BatchPolicy(max_batch_size=4)
    )
    other = bench.open("other", workers=(A, B), seconds=1e-3)
    bench.enqueue(line, "suspect")
    await settle()
    ((address, _),) = bench.batches
    bench.lose(address)
    bench.join("tcp://c:1")
    bench.dispatcher.device_ready("other", "1", "tcp://c:1", "cpu", [(1, 1e-3)])
    # Everything is busy again before the suspect is asked.
    made = 0
    answered = 0
    for _ in range(200):
        made += 1
        bench.enqueue(line, *[f"new-{made}-{i}" for i in range(8)], arrived=float(made))
        bench.enqueue(
            other, *[f"other-{made}-{i}" for i in range(8)], arrived=float(made)
        )
        await settle()
        if ["suspect"] in [keys for _, keys in bench.batches[1:]]:
            break
        bench.answer(answered + 1)
        answered += 1
    position = [keys for _, keys in bench.batches].index(["suspect"], 1)
    device = bench.batches[position][0]
    (running,) = [
        b for b in bench.dispatcher.running.batches.values() if b.device.name == device
    ]
    assert list(running.requests) == ["suspect"]
    # Nothing is queued behind it, and nobody is held back once it is answered.
    bench.answer(position)
    await settle()
    assert not bench.dispatcher.chooser.reserved
    assert len([b for b, _ in bench.batches[position + 1 :] if b == device]) >= 1


@on_loop
async def test_a_retry_avoids_the_worker_that_failed_while_another_is_ready():
    bench = Bench()
    line = bench.open(workers=(A, B), seconds=1e-3)
    (request,) = bench.enqueue(line, "k", tried=frozenset({A}))
    await settle()
    assert bench.batches == [(B, ["k"])]
    bench.answer(failed={"k": {"exception_text": "no"}}, keys=[])
    assert request.tried == {A, B}
    # Where all have been tried, any is better than none.
    bench.dispatcher.waiting.enqueue(request, line)
    await settle()
    assert len(bench.batches) == 2


@on_loop
async def test_a_retry_leaves_the_preferred_worker_that_failed():
    bench = Bench()
    line = bench.open(workers=(A, B), seconds=1e-3)
    preferred = Constraint(workers=frozenset({A}), preferred_only=True)
    bench.enqueue(line, "k", constraint=preferred, tried=frozenset({A}))
    await settle()
    assert bench.batches == [(B, ["k"])]


@on_loop
async def test_a_failed_attempt_is_tried_again_later_and_elsewhere():
    bench = Bench()
    line = bench.open(workers=(A, B), seconds=1e-3)
    line.retry = RetryPolicy(max_attempts=2, backoff=0.02, jitter=0)
    line.batch_timeout = 0.05
    (request,) = bench.enqueue(line, "k")
    await settle()
    ((address, _),) = bench.batches
    recovery = bench.dispatcher.recovery
    await come(lambda: request.delayed)
    assert len(recovery.delayed) == len(bench.batches) == 1
    await come(lambda: len(bench.batches) == 2)
    assert bench.batches[1] == ({A: B, B: A}[address], ["k"])
    assert not request.delayed and not len(recovery.delayed)
    await come(lambda: "k" in bench.tasks.failed)
    assert isinstance(bench.tasks.failed["k"], BatchTimeout)
    assert bench.tasks.failed["k"].attempts == 2


@on_loop
async def test_requests_that_are_held_back_leave_with_their_deployment():
    bench = Bench()
    line = bench.open()
    line.retry = RetryPolicy(backoff=100, max_backoff=100)
    gone, closed = bench.enqueue(line, "gone", "closed")
    run_ids = {"gone": 1, "closed": 2}
    batch = Batch("m-1", line, line.devices[A], run_ids, {}, 2, 0.0)
    bench.dispatcher.recovery.timed_out(batch, [gone, closed])
    bench.dispatcher.waiting.discard(gone)
    assert not gone.delayed
    assert bench.dispatcher.close("m", "1") == [closed]
    assert not closed.delayed
    assert len(bench.dispatcher.recovery.delayed) == 0


@on_loop
@pytest.mark.parametrize("backoff", [0, 0.1])
@pytest.mark.parametrize("how", ["died", "late"])
async def test_what_runs_when_its_deployment_is_replaced_is_served_by_the_new_one(
    how, backoff
):
    bench = Bench().follow()
    old = bench.open(workers=(A, B), seconds=1e-3)
    old.batch_timeout = 0.05
    old.retry = RetryPolicy(backoff=backoff, max_backoff=backoff, jitter=0)
    bench.enqueue(old, "a", "b")
    await settle()
    ((address, _),) = bench.batches
    bench.dispatcher.close("m", "1")
    new = bench.open(workers=(A, B), seconds=1e-3)
    # What the lifecycle finds when they are parked again.
    bench.requests = {key: (r, new) for key, (r, _) in bench.requests.items()}
    (batch,) = bench.dispatcher.running.batches.values()
    requests = list(batch.requests.values())
    if how == "died":
        bench.tasks.workers.remove(address)
        for request in requests:
            bench.dispatcher.unassign(request)
            bench.dispatcher.waiting.enqueue(request, new)
        bench.dispatcher.worker_lost(address)
    else:
        await come(lambda: not batch.requests)
    for index, key in enumerate("ab", start=1):
        await come(lambda index=index: len(bench.batches) > index)
        assert bench.batches[index] == ({A: B, B: A}[address], [key])
        bench.answer(index)
    assert not new.queue.count and not new.delayed and not old.delayed


@on_loop
async def test_a_reservation_ends_with_the_request_it_was_for():
    bench = Bench()
    line = bench.open(seconds=1e-3, policy=BatchPolicy(max_batch_size=1))
    bench.enqueue(line, "running")
    await settle()
    (suspect,) = bench.enqueue(line, "suspect", arrived=-1.0, group="g")
    await settle()
    assert len(bench.dispatcher.chooser.reserved) == 1
    bench.enqueue(line, "next")
    bench.dispatcher.waiting.discard(suspect)
    bench.answer(0)
    await settle()
    assert bench.batches[-1] == (A, ["next"])
    assert not bench.dispatcher.chooser.reserved
    # Also where nobody else waits.
    (suspect,) = bench.enqueue(line, "suspect", group="g")
    await settle()
    assert len(bench.dispatcher.chooser.reserved) == 1
    bench.dispatcher.waiting.discard(suspect)
    bench.answer()
    await settle()
    assert not bench.dispatcher.chooser.reserved


@on_loop
async def test_answers_that_are_lost_cost_two_more_deaths_at_most():
    """Each time the one before the deadly batch was done, and its answer got lost."""
    bench = Bench()
    line = bench.open(seconds=1e-3, policy=BatchPolicy(max_batch_size=8))
    before, *_ = bench.enqueue(line, *[f"before-{i}" for i in range(8)])
    requests = bench.enqueue(line, *range(8), arrived=1.0)
    for i, address in enumerate([A, B]):
        await settle()
        assert bench.batches[-1] == (address, list(range(8)))
        bench.lose(address)
        for waiting in line.queue.requests():
            if waiting not in requests:
                bench.dispatcher.waiting.discard(waiting)
        if i == 0:
            ahead = [f"again-{j}" for j in range(8)]
            bench.enqueue(line, *ahead, arrived=-1.0)
        bench.join([B, "tcp://c:1"][i])
    assert {(r.charges, r.bystander) for r in requests} == {(0, 2)}
    assert before.charges == 1
    # Suspected by now, they are alone: two deaths more, or as many as the policy wants.
    assert await run_with_deadly(bench, line, {3}) == 3
    assert list(bench.tasks.failed) == [3]
    assert sorted(bench.answered) == [0, 1, 2, 4, 5, 6, 7]


# Devices that break


@pytest.mark.parametrize("n", [1, 8, 64])
@on_loop
async def test_a_request_that_breaks_devices_ends_alone(n):
    bench = Bench()
    line = bench.open(
        workers=(A, B), policy=BatchPolicy(max_batch_size=64), seconds=1e-3
    )
    line.retry = RetryPolicy(backoff=0, max_backoff=0)
    bench.enqueue(line, *range(n))
    poison = n // 2
    deaths = await run_with_deadly(bench, line, {poison}, break_device)
    assert deaths == expected_deaths(n)
    assert list(bench.tasks.failed) == [poison]
    error = bench.tasks.failed[poison]
    assert isinstance(error, DeviceError)
    assert "507015" in str(error)
    assert sorted(bench.answered) == [i for i in range(n) if i != poison]


@on_loop
async def test_only_those_under_whom_the_device_broke_are_charged():
    bench = Bench()
    line = bench.open(policy=BatchPolicy(max_batch_size=2), seconds=1e-3)
    requests = bench.enqueue(line, *"abcd")
    await settle()
    assert [keys for _, keys in bench.batches] == [["a", "b"], ["c", "d"]]
    break_device(bench, 0, struck=["b"])
    assert [r.charges for r in requests] == [0, 1, 0, 0]
    assert [r.bystander for r in requests] == [0, 0, 0, 0]
    # It was alone, so it waits for a while; the others don't.
    assert [r.delayed for r in requests] == [False, True, False, False]
    assert not bench.dispatcher.running.batches
    assert not line.devices and line.in_flight == 0


@on_loop
async def test_a_policy_without_device_errors_lets_it_fail():
    bench = Bench()
    line = bench.open(seconds=1e-3)
    line.retry = RetryPolicy(retry_on=[WorkerLost])
    bench.enqueue(line, "x")
    await settle()
    break_device(bench, 0)
    assert isinstance(bench.tasks.failed["x"], DeviceError)
