"""Batches that wait on their worker for more than their turn."""

from __future__ import annotations

import asyncio

import pytest

from daskinfer.policy import BatchPolicy
from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.health import Suspicion
from tests.scheduler.bench import A, B, Bench, come, settle
from tests.scheduler.test_supervision import SOON, limited, nothing_is_left, other
from tests.scheduler.virtual import on_loop

ONE_BY_ONE = BatchPolicy(max_batch_size=1)


@on_loop
async def test_only_the_time_that_a_batch_runs_is_limited():
    bench = Bench().follow()
    line = limited(bench)
    bench.enqueue(line, "k")
    await settle()
    ((address, _),) = bench.batches
    bench.progress(0, begun=False)
    await asyncio.sleep(100)
    assert line.health.is_perfect and len(bench.batches) == 1
    bench.progress(0, begun=True)
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
async def test_one_that_waits_long_lets_its_requests_run_elsewhere():
    bench = Bench(suspicion=SOON).follow()
    line = bench.open(workers=(A, B), seconds=1e-3)
    bench.enqueue(line, "k")
    await settle()
    ((address, _),) = bench.batches
    bench.progress(0, begun=False)
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
    bench.progress(0, begun=False)
    if begun:
        # The second has to wait behind the first again.
        bench.progress(0, begun=True)
    bench.lose(A)
    assert (first.charges, second.charges) == ((1, 0) if begun else (0, 1))


@on_loop
async def test_nobody_is_charged_for_a_death_where_nothing_had_begun():
    bench = Bench()
    line = bench.open(policy=ONE_BY_ONE)
    first, second = bench.enqueue(line, 1, 2)
    await settle()
    for index in range(2):
        bench.progress(index, begun=False)
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
    bench.dispatcher.progressed(batch.batch_id, B, begun=False)
    assert batch.is_running
    bench.answer(0)
    bench.progress(0, begun=False)
    nothing_is_left(bench)
