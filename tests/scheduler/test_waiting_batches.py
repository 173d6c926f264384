"""Batches that wait on their worker for more than their turn."""

from __future__ import annotations

import asyncio

import pytest

from daskinfer.policy import BatchPolicy
from daskinfer.protocol import DEVICE, INPUTS
from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.health import Suspicion
from scheduler_plugins.load import FETCHING
from tests.scheduler.bench import A, B, Bench, come, settle
from tests.scheduler.test_supervision import SOON, limited, nothing_is_left, other
from tests.scheduler.virtual import on_loop

ONE_BY_ONE = BatchPolicy(max_batch_size=1)


BOTH = pytest.mark.parametrize("waits_for", [DEVICE, INPUTS])


@on_loop
@BOTH
async def test_only_the_time_that_a_batch_runs_is_limited(waits_for):
    bench = Bench().follow()
    line = limited(bench)
    bench.enqueue(line, "k")
    await settle()
    ((address, _),) = bench.batches
    bench.progress(0, waits_for)
    await asyncio.sleep(100)
    assert line.health.is_perfect and len(bench.batches) == 1
    bench.progress(0, "")
    await asyncio.sleep(0.03)
    assert line.health.is_perfect
    await come(lambda: not line.health.is_perfect)
    state, reason = line.health.state(address, asyncio.get_running_loop().time())
    assert state is BreakerState.OPEN and "ran for longer than 0.05 s" in reason
    await come(lambda: len(bench.batches) == 2)
    bench.answer(1)
    bench.answer(0)
    nothing_is_left(bench)


@on_loop
@BOTH
async def test_one_that_waits_long_lets_its_requests_run_elsewhere(waits_for):
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(workers=(A, B), seconds=1e-3)
    bench.enqueue(line, "k")
    await settle()
    ((address, _),) = bench.batches
    bench.progress(0, waits_for)
    await come(lambda: len(bench.batches) == 2)
    assert bench.batches[1] == (other(address), ["k"])
    # It has not begun, so it can be called off.
    assert [m["op"] for a, m in bench.sent if a == address] == [
        "daskinfer-run",
        "daskinfer-drop",
    ]
    (request, _) = bench.requests["k"]
    assert request.charges == 0 and not request.hedged
    bench.answer(1)
    bench.answer(0, keys=[])
    nothing_is_left(bench)


@on_loop
@pytest.mark.parametrize("begun", [False, True])
async def test_what_runs_is_charged_for_a_death_and_not_what_waits(begun):
    bench = Bench()
    line = bench.open(policy=ONE_BY_ONE)
    first, second = bench.enqueue(line, 1, 2)
    await settle()
    assert len(bench.batches) == 2
    bench.progress(0, DEVICE)
    if begun:
        # The second has to wait behind the first again.
        bench.progress(0, "")
    bench.lose(A)
    assert (first.charges, second.charges) == ((1, 0) if begun else (0, 1))


@on_loop
async def test_nobody_is_charged_for_a_death_where_nothing_had_begun():
    bench = Bench()
    line = bench.open(policy=ONE_BY_ONE)
    first, second = bench.enqueue(line, 1, 2)
    await settle()
    for index in range(2):
        bench.progress(index, DEVICE)
    bench.lose(A)
    assert (first.charges, second.charges) == (0, 0)
    assert line.queue.requests() == [first, second]


@on_loop
async def test_words_about_batches_that_are_gone_or_of_others_are_ignored():
    bench = Bench(suspicion=Suspicion(20, 1e9))
    line = bench.open(policy=ONE_BY_ONE)
    bench.enqueue(line, 1)
    await settle()
    (batch,) = bench.dispatcher.running.batches.values()
    bench.dispatcher.progressed(batch.batch_id, B, DEVICE)
    assert batch.is_running
    bench.answer(0)
    bench.progress(0, DEVICE)
    nothing_is_left(bench)


@on_loop
async def test_a_device_serves_others_while_batches_wait_for_inputs():
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(policy=ONE_BY_ONE, seconds=1e-3)
    device = line.devices[A]
    bench.enqueue(line, *range(20))
    for index in range(10):
        await come(lambda index=index: len(bench.runs) > index)
        bench.progress(index, INPUTS)
        assert device.fetches_enough == (index + 1 >= FETCHING)
    assert device.idle and device.expected_free(0.0, bench.dispatcher.link) < 1.0
    await come(lambda: len(bench.runs) == 12)
    for index in (10, 11):
        bench.answer(index)
    await come(lambda: len(bench.runs) == 14)
    # What has its inputs runs before those that were ahead of it.
    bench.progress(3, "")
    assert device.running is not None
    assert device.running.batch_id == bench.runs[3][1]["batch"]
    bench.answer(3)
    for index in {*range(10), 12, 13} - {3}:
        bench.answer(index)
    for index in range(14, 20):
        await come(lambda index=index: len(bench.runs) > index)
        bench.answer(index)
    assert line.health.is_perfect
    nothing_is_left(bench)
