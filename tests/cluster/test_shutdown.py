"""Workers and schedulers that stop on purpose, with requests in every state."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from dask.utils import parse_timedelta
from distributed import CancelledError, Client, Scheduler, Status, Worker
from distributed.metrics import monotonic
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import RetryPolicy, SchedulerLost
from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, queued

TWO_WORKERS = [("127.0.0.1", 1)] * 2


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


async def in_every_state(
    client: Client, scheduler: Scheduler, probe: Probe, workers: int, backoff: str
) -> list[Any]:
    """Two requests that are running on each worker, two queued, and two held back."""
    model = await deploy(
        client,
        probe,
        max_batch_size=1,
        warmup=ONE,
        retry=RetryPolicy(backoff=backoff, max_backoff=backoff, jitter=0),
    )
    probe.close()
    dispatcher = engine(scheduler).dispatcher
    running = 2 * workers
    futures = model.map([row(i) for i in range(running + 4)])
    await until(lambda: len(dispatcher.running.batches) == running)
    await queued(scheduler, 4)
    line = dispatcher.lines["m", "1"]
    for request in line.queue.requests()[:2]:
        until_then = monotonic() + parse_timedelta(backoff)
        dispatcher.recovery.hold_back(request, line, until_then)
    assert (len(line.queue), line.delayed) == (2, 2)
    return futures


async def all_answered(futures: list[Any]) -> None:
    answers = await asyncio.wait_for(asyncio.gather(*futures), PATIENCE)
    assert [float(y[0, 0]) for y in answers] == [2.0 * i for i in range(len(futures))]


@pytest.mark.parametrize("how", ["retire", "close gracefully", "close"])
def test_requests_of_a_worker_that_stops_run_on_the_other(how: str) -> None:
    @gen_cluster(client=True, nthreads=TWO_WORKERS, timeout=60)
    async def check(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        probe = Probe()
        futures = await in_every_state(c, s, probe, 2, backoff="10ms")
        if how == "retire":
            await s.retire_workers([a.address])
        elif how == "close gracefully":
            await a.close_gracefully()
        else:
            await a.close()
        await until(lambda: list(s.workers) == [b.address])
        probe.open()
        await all_answered(futures)
        assert not engine(s).dispatcher.running.batches

    check()


@gen_cluster(client=True, nthreads=TWO_WORKERS, timeout=60)
async def test_a_paused_worker_ends_what_it_has_and_gets_no_more(c, s, a, b):
    probe = Probe()
    futures = await in_every_state(c, s, probe, 2, backoff="10ms")
    for worker in (a, b):
        worker.memory_manager.memory_pause_fraction = False
        worker.status = Status.paused
    await until(lambda: not s.running)
    probe.open()
    dispatcher = engine(s).dispatcher
    await until(lambda: not dispatcher.running.batches)
    line = dispatcher.lines["m", "1"]
    await until(lambda: len(line.queue) == 4)
    assert [future.status for future in futures].count("pending") == 4
    assert "paused" in engine(s).diagnosis.problem(line)
    a.status = Status.running
    await all_answered(futures)


@gen_cluster(client=True, nthreads=TWO_WORKERS, timeout=60)
async def test_a_restart_leaves_nobody_waiting(c, s, a, b):
    probe = Probe()
    futures = await in_every_state(c, s, probe, 2, backoff="1h")
    dispatcher = engine(s).dispatcher
    # Without Nannies nobody starts the workers again: it says so, once all is undone.
    with pytest.raises(asyncio.TimeoutError):
        await s.restart(stimulus_id="test", timeout=0.1)
    for future in futures:
        with pytest.raises(CancelledError):
            await future
    assert not engine(s).requests and not dispatcher.running.batches
    assert not dispatcher.recovery.delayed.keys()
    line = dispatcher.lines["m", "1"]
    assert (len(line.queue), line.delayed, line.in_flight) == (0, 0, 0)
    probe.open()
    async with Worker(s.address):
        model = await daskinfer.get(c, "m")
        assert np.array_equal(await model.submit(ONE), 2 * ONE)


def test_a_scheduler_that_closes_leaves_nobody_waiting() -> None:
    @gen_cluster(nthreads=[("", 1)], timeout=60)
    async def check(s: Scheduler, a: Worker) -> None:
        probe = Probe()
        async with Client(s.address, asynchronous=True, timeout=1) as c:
            futures = await in_every_state(c, s, probe, 1, backoff="1h")
            model = await daskinfer.get(c, "m")
            plain = c.submit(model, ONE)
            whole = asyncio.ensure_future(model.predict(np.ones((8, 1))))
            packed = asyncio.ensure_future(daskinfer.gather(futures))
            await until(lambda: len(engine(s).requests) > len(futures) + 1)
            await asyncio.wait_for(s.close(), PATIENCE)
            for wanted in (*futures, whole, packed):
                with pytest.raises(SchedulerLost, match="send it again"):
                    await asyncio.wait_for(wanted, PATIENCE)
            # Dask's own futures keep Dask's own reason.
            with pytest.raises(CancelledError, match="scheduler-connection-lost"):
                await asyncio.wait_for(plain, PATIENCE)
        probe.open()

    check()
