"""Cancelling at every moment of a request's life, many times over."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from distributed import CancelledError
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left

TWO_WORKERS = [("127.0.0.1", 1)] * 2


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


@pytest.mark.parametrize("moment", ["queued", "dispatched", "running", "completed"])
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_cancelled_at(c, s, a, b, moment):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=4, warmup=ONE)
    dispatcher = engine(s).dispatcher
    probe.calls.clear()
    probe.close()
    futures = model.map([row(i) for i in range(40)])

    async def cancelled() -> None:
        await c.cancel(futures[::2])

    if moment == "queued":
        await cancelled()
    elif moment == "dispatched":
        # The batch has left; the worker may not have it yet.
        await until(lambda: bool(dispatcher.running.batches))
        await cancelled()
    elif moment == "running":
        await probe.entered()
        await cancelled()
    else:
        # The answers are on their way while the cancellation is.
        await probe.entered()
        probe.open()
        await cancelled()
    probe.open()
    for i, future in enumerate(futures):
        if i % 2:
            assert np.array_equal(await future, row(2 * i))
        else:
            assert future.status == "cancelled"
            with pytest.raises(CancelledError):
                await future
    # No slot is lost: everything is served as before.
    assert np.array_equal(await model.submit(row(99)), row(198))
    status = await model.status()
    assert (status.waiting, status.in_flight) == (0, 0)
    assert status.requests == 41
    assert status.successes + status.cancelled >= 41
    futures.clear()
    del future
    await nothing_is_left(s, a, b)


@pytest.mark.parametrize("seed", range(3))
@gen_cluster(client=True, nthreads=TWO_WORKERS, timeout=60)
async def test_cancelled_at_random(c, s, a, b, seed):
    chance = random.Random(seed)
    model = await deploy(c, Probe(), max_batch_size=8, warmup=ONE)
    kept = []
    for i in range(60):
        futures = model.options(timeout="1h").map([row(100 * i + j) for j in range(10)])
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        gone = chance.sample(range(10), chance.randrange(10))
        if gone:
            await c.cancel([futures[j] for j in gone])
        kept += [(100 * i + j, f) for j, f in enumerate(futures) if j not in gone]
    for value, future in kept:
        assert np.array_equal(await future, row(2 * value))
    s.validate_state()
    status = await model.status()
    assert (status.waiting, status.in_flight, status.failures) == (0, 0, 0)
    kept.clear()
    del futures, future
    await nothing_is_left(s, a, b)
