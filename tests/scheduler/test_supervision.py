"""Devices that are late or fail, and where their requests go."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from daskinfer import BreakerPolicy, RetryPolicy
from daskinfer.exceptions import BatchTimeout
from daskinfer.policy import BatchPolicy
from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.constraint import Constraint
from scheduler_plugins.health import Health, Suspicion
from scheduler_plugins.line import Line
from tests.scheduler.bench import A, B, Bench, come, settle
from tests.scheduler.virtual import on_loop

FAILURE = {"exception_text": "ValueError('no')"}
SOON = Suspicion(factor=1.0, after=0.05)
AT_ONCE = RetryPolicy(backoff=0, max_backoff=0)


def other(address: str) -> str:
    return {A: B, B: A}[address]


def limited(bench: Bench, **kwargs: Any) -> Line:
    """A version whose batches may take a twentieth of a second."""
    line = bench.open(workers=(A, B), seconds=1e-3, **kwargs)
    line.batch_timeout = 0.05
    line.retry = AT_ONCE
    return line


def nothing_is_left(bench: Bench) -> None:
    dispatcher = bench.dispatcher
    assert not dispatcher.running.batches and not dispatcher.running.unwanted
    assert not len(dispatcher.supervision.watched)
    assert not dispatcher.supervision._fitness.stuck
    for line in dispatcher.lines.values():
        assert not line.queue.count and not line.in_flight
        assert all(d.idle and not d.stuck for d in line.devices.values())


# Batches past their time limit


@on_loop
async def test_a_batch_past_its_time_is_given_up_and_its_requests_go_elsewhere(caplog):
    bench = Bench().follow()
    line = limited(bench)
    bench.enqueue(line, "k")
    await settle()
    ((late, _),) = bench.batches
    with caplog.at_level(logging.WARNING):
        await come(lambda: len(bench.batches) == 2)
    assert bench.batches[1] == (other(late), ["k"])
    (request, _) = bench.requests["k"]
    assert (request.charges, request.solo, request.tried) == (1, 1, {late})
    # It is not told to drop what it runs: that may be the first answer.
    assert [m["op"] for _, m in bench.sent] == ["daskinfer-run"] * 2
    assert f"{late} gets no requests for 'm' for 5 s: batch m-1" in caplog.text
    state, reason = line.health.state(late, 0.0)
    assert state is BreakerState.OPEN and "ran for longer than 0.05 s" in reason
    bench.answer(1)
    bench.answer(0)
    nothing_is_left(bench)


@on_loop
async def test_the_time_counts_from_the_start_on_the_device():
    """The second batch is not late because the first takes its time."""
    bench = Bench().follow()
    line = bench.open(seconds=1e-3, policy=BatchPolicy(max_batch_size=1))
    line.batch_timeout = 0.3
    bench.enqueue(line, 1, 2)
    await settle()
    assert len(bench.batches) == 2
    await asyncio.sleep(0.2)
    bench.answer(0)
    await asyncio.sleep(0.2)
    dispatcher = bench.dispatcher
    dispatcher.wake()
    await settle()
    assert line.health.is_perfect and bench.tasks.released == []
    await come(lambda: not line.health.is_perfect)
    assert bench.tasks.released == [2]


@on_loop
async def test_what_never_ends_is_found_and_its_batch_mates_are_answered():
    bench = Bench().follow()
    line = limited(bench, policy=BatchPolicy(max_batch_size=64))
    line.health = Health(BreakerPolicy(cooldown=1e-3, max_cooldown=1e-3))
    bench.enqueue(line, *range(20))
    answered: set[Any] = set()
    done: set[int] = set()
    innocent = set(range(20)) - {13}
    while answered < innocent or 13 not in bench.tasks.failed:
        await come(lambda: len(bench.runs) > len(done))
        for index, (_, message) in enumerate(bench.runs):
            if index in done:
                continue
            done.add(index)
            if 13 in message["keys"]:
                # It ends at last, when its requests have been given up.
                batch_id = message["batch"]
                batch = bench.dispatcher.running.batches[batch_id]
                await come(lambda batch=batch: not batch.requests)
                if 13 in bench.tasks.failed:
                    # What the transition hook does.
                    bench.dispatcher.waiting.discard(bench.requests[13][0])
                bench.answer(index, keys=[], failed={})
            else:
                bench.answer(index)
                assert not answered & set(message["keys"])
                answered |= set(message["keys"])
    error = bench.tasks.failed[13]
    assert isinstance(error, BatchTimeout) and error.attempts == 4
    assert list(bench.tasks.failed) == [13]
    assert answered == innocent


@on_loop
async def test_a_batch_that_goes_on_long_after_it_was_given_up_is_told_of_once():
    bench = Bench(suspicion=Suspicion(1.0, math.inf, hung_after=1.0)).follow()
    limited(bench)
    bench.enqueue(bench.dispatcher.lines["m", "1"], "k")
    await settle()
    ((late, _),) = bench.batches
    await come(lambda: len(bench.batches) == 2)
    bench.answer(1)
    assert not bench.hung
    await come(lambda: bench.hung)
    assert bench.hung == [(late, "batch m-1 of 'm' runs on 1 s after it was given up")]
    await asyncio.sleep(60)
    assert len(bench.hung) == 1
    bench.answer(0, keys=[])
    nothing_is_left(bench)


@on_loop
async def test_one_that_ends_soon_after_it_was_given_up_is_not_told_of():
    bench = Bench(suspicion=Suspicion(1.0, math.inf, hung_after=1.0)).follow()
    limited(bench)
    bench.enqueue(bench.dispatcher.lines["m", "1"], "k")
    await settle()
    await come(lambda: len(bench.batches) == 2)
    bench.answer(0)
    bench.answer(1, keys=[])
    await asyncio.sleep(60)
    assert not bench.hung


# Devices that do not answer


@on_loop
async def test_who_was_moved_once_is_moved_again_when_the_first_worker_is_gone():
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(workers=(A, B), seconds=1e-3)
    bench.enqueue(line, "k")
    await settle()
    ((first, _),) = bench.batches
    await come(lambda: len(bench.batches) == 2)
    bench.lose(first)
    bench.join("tcp://c:1")
    # The second one says nothing either.
    await come(lambda: len(bench.batches) == 3)
    assert bench.batches[2] == ("tcp://c:1", ["k"])
    bench.answer(2)
    bench.answer(1, keys=[])
    nothing_is_left(bench)


@on_loop
async def test_batches_of_a_suspect_go_elsewhere_once_and_are_not_charged():
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(
        workers=(A, B), seconds=1e-3, policy=BatchPolicy(max_batch_size=1)
    )
    bench.enqueue(line, *range(4))
    await settle()
    late = bench.batches[0][0]
    for index in range(4):
        if bench.batches[index][0] != late:
            bench.answer(index)
    held = [keys[0] for address, keys in bench.batches if address == late]
    assert len(held) == 2
    await come(lambda: len(bench.batches) == 6)
    assert sorted(bench.batches[4:]) == [(other(late), [key]) for key in held]
    for key in held:
        request, _ = bench.requests[key]
        assert (request.charges, request.tried) == (0, {late})
        assert request.hedged == (key == held[0])
    # What had not begun is dropped there; what runs may still be answered.
    drops = [(a, m["keys"]) for a, m in bench.sent if m["op"] == "daskinfer-drop"]
    assert len(drops) == 1 and drops[0][0] == late
    # The suspect gets nothing, though it has room, and the other one everything.
    bench.answer(4)
    bench.answer(5)
    bench.enqueue(line, "next")
    await settle()
    assert bench.batches[6:] == [(other(late), ["next"])]
    bench.answer(6)
    # It answers: one request goes there, to see; then all is as before.
    for index in range(4):
        if bench.batches[index][0] == late:
            bench.answer(index, keys=[])
    assert line.health.state(late, math.inf)[0] is BreakerState.HALF_OPEN
    bench.enqueue(line, *"abc", arrived=1.0)
    await settle()
    assert [a for a, _ in bench.batches[7:]].count(late) == 1
    trial = next(i for i in range(7, len(bench.runs)) if bench.batches[i][0] == late)
    bench.answer(trial)
    await settle()
    assert line.health.is_perfect
    answered = {trial}
    while len(answered) < len(bench.runs) - 7:
        for index in set(range(7, len(bench.runs))) - answered:
            bench.answer(index)
            answered.add(index)
        await settle()
    nothing_is_left(bench)


@on_loop
async def test_a_suspect_keeps_its_batches_until_another_worker_comes():
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(seconds=1e-3)
    bench.enqueue(line, 1)
    await settle()
    device = line.devices[A]
    await come(lambda: device.stuck)
    bench.enqueue(line, 2)
    await settle()
    assert bench.batches == [(A, [1])] and bench.tasks.released == []
    bench.join(B)
    await settle()
    assert bench.batches[1:] == [(B, [1]), (B, [2])]


@on_loop
async def test_a_suspect_is_one_for_all_deployments():
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(workers=(A, B), seconds=1e-3)
    neighbour = bench.open("other", workers=(A, B), seconds=1e-3)
    bench.enqueue(line, 1)
    await settle()
    late = bench.batches[0][0]
    await come(lambda: line.devices[late].stuck)
    for key in range(10, 14):
        bench.enqueue(neighbour, key, signature=key)
    await settle()
    assert {a for a, _ in bench.batches[1:]} == {other(late)}


@on_loop
async def test_late_results_are_taken_if_they_come_first():
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(workers=(A, B), seconds=1e-3)
    bench.enqueue(line, 1, 2)
    await settle()
    await come(lambda: len(bench.batches) == 2)
    bench.answer(0, failed={2: FAILURE}, keys=[1], missing=[2])
    assert bench.tasks.adopted == [1]
    _, run_ids = bench.tasks.completed[-1]
    assert run_ids == {1: 3}
    # What it says of the other counts for nothing: another attempt decides.
    assert bench.tasks.failed == {} and bench.tasks.released == [1, 2]


@on_loop
async def test_a_suspect_that_dies_charges_nobody_who_is_elsewhere_by_then():
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(workers=(A, B), seconds=1e-3)
    bench.enqueue(line, 1)
    await settle()
    await come(lambda: len(bench.batches) == 2)
    bench.lose(bench.batches[0][0])
    request, _ = bench.requests[1]
    assert (request.charges, request.bystander) == (0, 0)
    bench.answer(1)
    nothing_is_left(bench)


# Workers that fail


@on_loop
async def test_a_worker_that_fails_fast_attracts_no_more_than_its_share(caplog):
    bench = Bench().follow()
    line = bench.open(
        workers=(A, B), seconds=0.02, policy=BatchPolicy(max_batch_size=1)
    )
    line.health = Health(BreakerPolicy(cooldown=0.2, max_cooldown=10))
    bench.enqueue(line, *range(400))
    loop = asyncio.get_running_loop()
    started, answered = loop.time(), 0
    due: list[tuple[float, int]] = []
    with caplog.at_level(logging.WARNING):
        while loop.time() < started + 1.5:
            for index in range(answered, len(bench.runs)):
                # A fails at once; B takes its time.
                ready_at = loop.time() + (0.0 if bench.batches[index][0] == A else 0.02)
                due.append((ready_at, index))
            answered = len(bench.runs)
            for ready_at, index in list(due):
                if ready_at <= loop.time():
                    due.remove((ready_at, index))
                    if bench.batches[index][0] == A:
                        keys = bench.batches[index][1]
                        bench.answer(index, keys=[], failed={keys[0]: FAILURE})
                    else:
                        bench.answer(index)
            await asyncio.sleep(0.001)
    shares = [address for address, _ in bench.batches]
    assert shares.count(A) <= shares.count(B)
    assert shares.count(A) <= 20 < shares.count(B)
    assert "all of its latest batches failed (ValueError), which" in caplog.text
    # What a model says may hold inputs.
    assert FAILURE["exception_text"] not in caplog.text
    bench.dispatcher.clear()


@on_loop
async def test_requests_wait_for_the_earliest_cooldown_when_nobody_is_fit():
    bench = Bench().follow()
    line = bench.open(workers=(A, B), seconds=1e-3)
    line.health = Health(BreakerPolicy(cooldown=0.1))
    now = asyncio.get_running_loop().time()
    line.health.open(A, now, "a")
    line.health.open(B, now + 0.2, "b")
    bench.enqueue(line, *range(8))
    await settle()
    assert bench.batches == []
    await come(lambda: bench.batches)
    # One request, not all of them.
    assert bench.batches == [(A, [0])]
    await come(lambda: len(bench.batches) == 2)
    assert bench.batches[1] == (B, [1])
    bench.answer(0)
    await settle()
    assert bench.batches[2] == (A, [2, 3, 4, 5, 6, 7])


@on_loop
async def test_a_trial_that_nobody_wants_any_more_is_followed_by_another():
    bench = Bench().follow()
    line = bench.open(seconds=1e-3)
    line.health.doubt(A, 0.0, "doubt")
    bench.enqueue(line, 1, 2)
    await settle()
    assert bench.batches == [(A, [1])]
    bench.answer(0, keys=[])
    await settle()
    assert bench.batches[1:] == [(A, [2])]
    bench.answer(1)
    assert line.health.is_perfect
    nothing_is_left(bench)


@on_loop
async def test_a_process_in_place_of_a_broken_one_is_tried_with_one_request_first():
    bench = Bench().follow()
    line = bench.open(seconds=1e-3)
    bench.dispatcher.device_failed(A)
    assert not line.devices
    bench.enqueue(line, *range(4))
    await settle()
    assert bench.batches == []
    timings = [(1, 1e-3), (64, 1e-3)]
    bench.dispatcher.device_ready("m", "1", A, "cpu", timings, "its process is new")
    assert line.health.state(A, 1e9) == (BreakerState.HALF_OPEN, "its process is new")
    await settle()
    assert bench.batches == [(A, [0])]
    bench.answer(0)
    await settle()
    assert bench.batches[1:] == [(A, [1, 2, 3])]
    assert line.health.is_perfect
    bench.answer(1)
    nothing_is_left(bench)


@on_loop
async def test_an_isolated_request_tries_the_only_worker_that_it_may_use():
    """Others are fit, which is of no use to it."""
    bench = Bench().follow()
    line = limited(bench)
    bench.enqueue(line, "k", constraint=Constraint(workers=frozenset({A})))
    await come(lambda: line.health.breakers)
    bench.answer(0, keys=[])
    await come(lambda: len(bench.batches) == 2)
    assert bench.batches[1] == (A, ["k"])
    bench.answer(1)
    nothing_is_left(bench)


@on_loop
async def test_an_isolated_request_tries_a_worker_that_others_keep_busy():
    bench = Bench().follow()
    line = bench.open(seconds=1e-3)
    line.batch_timeout, line.retry = 0.05, AT_ONCE
    one_by_one = BatchPolicy(max_batch_size=1)
    other = bench.open("other", seconds=1e-3, policy=one_by_one)
    bench.enqueue(line, "k")
    await come(lambda: line.health.breakers)
    bench.enqueue(other, *range(3000))
    bench.answer(0, keys=[])
    answered = 1
    while (A, ["k"]) not in bench.batches[1:]:
        await come(lambda answered=answered: len(bench.runs) > answered)
        await asyncio.sleep(0.005)
        bench.answer(answered)
        answered += 1
        await settle()
        assert answered < 2000
    assert not bench.dispatcher.chooser.reserved


@on_loop
async def test_a_trial_takes_nobody_back_to_where_it_has_failed():
    bench = Bench().follow()
    line = limited(bench)
    line.health.doubt(A, 0.0, "it was late")
    bench.enqueue(line, "retry", tried=frozenset({A}))
    await settle()
    assert bench.batches == [(B, ["retry"])]
    bench.enqueue(line, "new", arrived=1.0)
    await settle()
    assert bench.batches[1:] == [(A, ["new"])]


@on_loop
async def test_what_waits_behind_another_device_of_its_worker_is_not_late():
    """A worker runs one batch after the other, whichever of its devices they need."""
    bench = Bench(suspicion=Suspicion(factor=2.0, after=0.05)).follow()
    on_cpu = bench.open("on-cpu", seconds=10.0, timings=[(1, 10.0)])
    on_npu = bench.open("on-npu", seconds=1e-3, workers=())
    bench.dispatcher.device_ready("on-npu", "1", A, "npu", [(1, 1e-3), (64, 1e-3)])
    on_npu.batch_timeout = 0.5
    bench.enqueue(on_cpu, "first")
    await settle()
    # Not before there is room behind it.
    bench.enqueue(on_npu, "behind")
    await come(lambda: len(bench.batches) == 2)
    await asyncio.sleep(0.1)
    bench.answer(0)
    bench.answer(1)
    assert on_npu.health.is_perfect and bench.requests["behind"][0].charges == 0
    nothing_is_left(bench)
    # If the first never ends, the worker is suspect for both.
    bench.enqueue(on_cpu, "late")
    await settle()
    await come(lambda: on_npu.devices[A].stuck)
    assert on_cpu.devices[A].stuck
    bench.answer(2)
    nothing_is_left(bench)
    assert not on_npu.health.admits(A) and not on_cpu.health.admits(A)


@on_loop
async def test_what_stands_behind_a_suspect_tries_a_worker_that_is_half_open():
    """Nobody else waits, who could try it first."""
    bench = Bench(suspicion=SOON).follow()
    one_by_one = BatchPolicy(max_batch_size=1)
    line = bench.open(workers=(A,), seconds=1e-3, policy=one_by_one)
    bench.enqueue(line, "late", "behind")
    await settle()
    assert bench.batches == [(A, ["late"]), (A, ["behind"])]
    timings = [(1, 1e-3), (64, 1e-3)]
    bench.dispatcher.device_ready("m", "1", B, "cpu", timings, "its process is new")
    await come(lambda: len(bench.batches) == 3)
    assert bench.batches[2] == (B, ["late"])
    bench.answer(2)
    await settle()
    assert bench.batches[3:] == [(B, ["behind"])]
    bench.answer(3)


@on_loop
async def test_what_stands_behind_a_suspect_goes_where_its_deployment_is_by_now():
    bench = Bench(suspicion=SOON).follow()
    one_by_one = BatchPolicy(max_batch_size=1)
    old = bench.open(workers=(A,), seconds=1e-3, policy=one_by_one)
    bench.enqueue(old, "late", "behind")
    await settle()
    bench.dispatcher.close("m", "1")
    new = bench.open(workers=(A, B), seconds=1e-3, policy=one_by_one)
    bench.requests = {key: (r, new) for key, (r, _) in bench.requests.items()}
    for index, key in enumerate(["late", "behind"], start=2):
        await come(lambda index=index: len(bench.batches) > index)
        assert bench.batches[index] == (B, [key])
        bench.answer(index)
