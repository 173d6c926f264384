"""Batches that wait on their worker for inputs, or for a task that has the device."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import DeadlineExceeded
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
)

WITH_GPU = [("127.0.0.1", 2, {"resources": {"GPU": 1}})]
TWO_WORKERS = [("127.0.0.1", 1)] * 2


async def time_passes(model: daskinfer.Model) -> None:
    """Let two seconds pass by the scheduler's clock."""
    with pytest.raises(DeadlineExceeded):
        await model.options(timeout="2s").submit(ONE + 1)


def some_wait(scheduler: object, count: int) -> bool:
    batches = engine(scheduler).dispatcher.running.batches.values()
    return sum(batch.waits_since is not None for batch in batches) == count


@gen_cluster(client=True, nthreads=WITH_GPU)
async def test_a_task_that_has_the_device_uses_up_no_batch_timeout(c, s, a):
    probe = Probe()
    model = await deploy(
        c,
        probe,
        device="cpu",
        resources={"GPU": 1},
        batch_timeout="1s",
        max_batch_size=1,
        warmup=ONE,
    )
    probe.calls.clear()
    task = Probe(is_open=False)
    holder = c.submit(task, 1, resources={"GPU": 1})
    await task.entered()
    futures = model.map([ONE, 3 * ONE])
    # Also the one behind it.
    await until(lambda: some_wait(s, 2))
    await time_passes(model)
    status = await model.status()
    assert [w.breaker for w in status.workers] == ["closed"]
    task.open()
    assert [y.item() for y in await daskinfer.gather(futures)] == [2, 6]
    assert [(await daskinfer.info(f)).attempts for f in futures] == [1, 1]
    assert await holder == 2
    del holder, futures
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_inputs_that_come_slowly_use_up_no_batch_timeout(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, batch_timeout="1s", warmup=ONE, max_batch_size=1)
    probe.calls.clear()
    gate = asyncio.Event()
    give = b.handlers["get_data"]

    async def give_late(comm: object, *args: object, **kwargs: object) -> object:
        await gate.wait()
        return await give(comm, *args, **kwargs)

    b.handlers["get_data"] = give_late
    (held,) = await c.scatter([5 * ONE], workers=[b.address])
    future = model.options(workers=[a.address]).submit(held)
    await until(lambda: some_wait(s, 1))
    # The device is free meanwhile.
    for i in range(3):
        y = await model.options(workers=[a.address]).submit(np.full((1, 1), i))
        assert y.item() == 2 * i
    with pytest.raises(DeadlineExceeded):
        await model.options(timeout="2s", workers=[a.address]).submit(held)
    gate.set()
    assert np.array_equal(await future, 10 * ONE)
    assert (await daskinfer.info(future)).attempts == 1
    del future, held
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3)
async def test_a_worker_that_cannot_fetch_inputs_lets_another_try(c, s, a, b, holder):
    model = await deploy(c, Probe(), warmup=ONE)
    give = holder.handlers["get_data"]
    refused = []

    async def give_but_to_a(comm: object, *args: object, **kwargs: object) -> object:
        if kwargs.get("who") == a.address:
            refused.append(kwargs["who"])
            comm.abort()
            raise OSError("no route")
        return await give(comm, *args, **kwargs)

    holder.handlers["get_data"] = give_but_to_a
    elsewhere = [a.address, b.address]
    held = await c.scatter([i * ONE for i in range(40)], workers=[holder.address])
    for i, x in enumerate(held):
        future = model.options(workers=elsewhere).submit(x)
        assert np.array_equal(await future, 2 * i * ONE)
        assert (await daskinfer.info(future)).attempts <= 2
    assert refused
    del held, future, x
    await nothing_is_left(s, a, b, holder)
