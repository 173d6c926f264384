"""Dask's own limits, set so that they would break what is held for a batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed import Nanny, Worker, wait
from distributed.utils_test import gen_cluster, inc

from daskinfer import RetryPolicy
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

UNFRIENDLY = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.no-workers-timeout": "1ms",
    "distributed.scheduler.worker-ttl": "1s",
}
TWO_WORKERS = [("127.0.0.1", 1)] * 2
COUNT = 40


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def slow_increment(seconds: float) -> Callable[[Any], Any]:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: np.ndarray) -> np.ndarray:
        import time

        time.sleep(seconds)
        return x + 1

    return answer


async def hopeless_task(client: Any, scheduler: Any) -> None:
    """See that Dask's own time-out works, and has passed since this was called."""
    # The cluster may have no worker at the moment, but it has none like this ever.
    future = client.submit(inc, 1, resources={"NONE": 1}, pure=False)
    await until(lambda: future.status == "error")


@pytest.mark.process
@gen_cluster(
    client=True, nthreads=TWO_WORKERS, Worker=Nanny, config=UNFRIENDLY, timeout=120
)
async def test_all_processes_are_killed_at_once(c, s, a, b):
    model = await deploy(c, slow_increment(0.02), max_batch_size=4, warmup=ONE)
    # What waits for its inputs only is Dask's own business, and has a grace here.
    futures = [
        *model.map([row(i) for i in range(COUNT)]),
        *c.map(model, [row(COUNT + i) for i in range(COUNT)]),
    ]
    chained = [model.submit(future) for future in futures[: COUNT // 2]]
    dispatcher = engine(s).dispatcher
    await until(lambda: len(dispatcher.running.batches) == 4)
    for nanny in (a, b):
        assert nanny.pid is not None
        os.kill(nanny.pid, signal.SIGKILL)
    await until(lambda: s._workers_removed_total == 2)
    await hopeless_task(c, s)
    for i, future in enumerate(futures):
        assert np.array_equal(await future, row(i + 1))
    for i, future in enumerate(chained):
        assert np.array_equal(await future, row(i + 2))
    status = await model.status()
    assert (status.waiting, status.in_flight, status.failures) == (0, 0, 0)
    s.validate_state()
    del futures, chained, future
    await nothing_is_left(s)


@pytest.mark.process
@gen_cluster(
    client=True, nthreads=TWO_WORKERS, Worker=Nanny, config=UNFRIENDLY, timeout=120
)
async def test_a_pass_that_is_longer_than_the_worker_ttl(c, s, a, b):
    # Dask waits for ten heartbeats at least, which are five seconds here.
    model = await deploy(c, slow_increment(7.0), max_batch_size=1)
    futures = model.map([row(0), row(1)])
    for i, future in enumerate(futures):
        assert np.array_equal(await future, row(i + 1))
    assert s._workers_removed_total == 0


@gen_cluster(client=True, nthreads=TWO_WORKERS, config=UNFRIENDLY)
async def test_a_worker_that_comes_late(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    special = model.options(resources={"SPECIAL": 1})
    held = special.map([row(i) for i in range(COUNT)])
    held += [c.submit(model, row(COUNT), resources={"SPECIAL": 1})]
    await queued(s, COUNT + 1)
    for _ in range(3):
        await hopeless_task(c, s)
    assert {future.status for future in held} == {"pending"}
    async with Worker(s.address, resources={"SPECIAL": 1}) as late:
        for i, future in enumerate(held):
            assert np.array_equal(await future, row(2 * i))
        del held, future
        await nothing_is_left(s, a, b, late)


@gen_cluster(client=True, nthreads=TWO_WORKERS, config=UNFRIENDLY)
async def test_workers_that_are_lost_again_and_again(c, s, a, b):
    """Who is to blame is the engine's own business."""
    probe = Probe()
    retry = RetryPolicy(max_attempts=10)
    model = await deploy(c, probe, max_batch_size=1, retry=retry)
    probe.close()
    futures = model.map([row(i) for i in range(8)])
    dispatcher = engine(s).dispatcher
    for worker in (a, b):
        await until(lambda w=worker: len(_on(dispatcher, w.address)) >= 1)
        await s.remove_worker(worker.address, stimulus_id="test", close=False)
    await queued(s, 8)
    for _ in range(2):
        async with Worker(s.address) as another:
            await until(lambda w=another: len(_on(dispatcher, w.address)) >= 1)
            await s.remove_worker(another.address, stimulus_id="test", close=False)
        await queued(s, 8)
        await hopeless_task(c, s)
    assert {future.status for future in futures} == {"pending"}
    probe.open()
    async with Worker(s.address):
        await wait(futures)
        for i, future in enumerate(futures):
            assert np.array_equal(await future, row(2 * i))


def _on(dispatcher: Any, address: str) -> list[Any]:
    batches = dispatcher.running.batches.values()
    return [batch for batch in batches if batch.device.name == address]
