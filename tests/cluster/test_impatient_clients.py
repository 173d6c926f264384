"""Clients that stop waiting, and those that wait after them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

BURST = 300
SOON = 0.05


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


async def drop(futures: list[Any]) -> None:
    """Give up by letting go."""
    futures.clear()
    # An exception that was raised here holds its own future, in a cycle, and is held
    # itself until the event loop goes on.
    await asyncio.sleep(0)
    gc.collect()


async def cancel(futures: list[Any]) -> None:
    await asyncio.gather(*(future.cancel() for future in futures))


async def keep(futures: list[Any]) -> None:
    """Give up waiting only."""


give_up = pytest.mark.parametrize("give_up", [drop, cancel, keep])
both_ways = pytest.mark.parametrize("way", ["client", "model"])


@both_ways
@give_up
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_burst_of_results_that_are_not_waited_for(
    c, s, a, b, way, give_up: Callable[[list[Any]], Awaitable[None]]
):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    probe.close()
    ask = model.submit if way == "model" else lambda x: c.submit(model, x)
    ahead = [ask(row(-i)) for i in range(1, 5)]
    dispatcher = engine(s).dispatcher
    await until(lambda: len(dispatcher.running.batches) == 4)
    burst = [ask(row(1000 + i)) for i in range(BURST)]
    ends = await asyncio.gather(
        *(future.result(timeout=SOON) for future in burst), return_exceptions=True
    )
    assert {type(end) for end in ends} == {asyncio.TimeoutError}
    ends.clear()
    await queued(s, BURST)
    await give_up(burst)
    left = BURST if give_up is keep else 0
    await queued(s, left)
    patient = [ask(row(i)) for i in range(100)]
    await queued(s, left + 100)
    probe.open()
    for i, future in enumerate(patient):
        assert np.array_equal(await future, row(2 * i))
    await wait(ahead)
    if give_up is keep:
        # Nobody has said that they are not wanted any more.
        await wait(burst)
    else:
        assert len(probe.calls) == 4 + 100
    status = await model.status()
    assert (status.waiting, status.in_flight, status.failures) == (0, 0, 0)
    del ahead, burst, patient, future
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_bursts_while_the_model_runs(c, s, a, b):
    """Time-outs of all kinds, at every stage of the requests that meet them."""
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=8, warmup=ONE)
    brief = model.options(timeout="2ms")
    for burst in range(5):
        futures = [
            *brief.map([row(i) for i in range(100)]),
            *model.map([row(i) for i in range(100)]),
        ]
        patient = [*model.map([row(i) for i in range(20)])]
        ends = await asyncio.gather(
            *(future.result(timeout=0.001 * burst) for future in futures),
            return_exceptions=True,
        )
        for i, end in enumerate(ends):
            assert isinstance(end, TimeoutError | asyncio.TimeoutError) or (
                np.array_equal(end, row(2 * (i % 100)))
            )
        del ends, end
        await cancel(futures[:50])
        for i, future in enumerate(patient):
            assert np.array_equal(await future, row(2 * i))
        del futures, patient, future
        await nothing_is_left(s, a, b)
    status = await model.status()
    assert (status.waiting, status.in_flight) == (0, 0)
    assert {worker.breaker for worker in status.workers} == {"closed"}
