"""Workers that come, go, pause and retire, and a cluster that scales."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
from dask.utils import parse_timedelta
from distributed import Nanny, Worker, wait
from distributed.core import Status
from distributed.scheduler import KilledWorker
from distributed.utils_test import captured_logger, gen_cluster, inc

import daskinfer
from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
    waiting,
)

#: The input of the warm-up.
WARM = -1.0

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = ONE_WORKER * 2


def row(value: float) -> np.ndarray:
    return np.full((1, 1), value)


def pause(worker) -> None:
    # The memory monitor would resume it.
    worker.memory_manager.memory_pause_fraction = False
    worker.status = Status.paused


def busy(scheduler) -> set[str]:
    return engine(scheduler).dispatcher.running.workers()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_worker_that_joins_gets_work_at_once(c, s, a):
    gate = threading.Event()

    def work(x):
        # Warming up is not held back.
        assert x[0, 0] == WARM or gate.wait(PATIENCE)
        return x

    probe = Probe(work)
    model = await deploy(c, probe, max_batch_size=1, warmup=row(WARM))
    futures = model.map([row(i) for i in range(10)])
    await queued(s, 8)
    async with Worker(s.address) as b:
        # The other one has finished nothing yet.
        await until(lambda: busy(s) == {a.address, b.address})
        gate.set()
        await wait(futures)
        workers = {(await daskinfer.info(future)).worker for future in futures}
        assert workers == {a.address, b.address}
        status = await model.status()
        assert {w.address for w in status.workers} == {a.address, b.address}


@gen_cluster(client=True, nthreads=[])
async def test_requests_wait_for_the_first_worker(c, s):
    model = await deploy(c, Probe(), wait=False)
    slow, fast = c.submit(model, row(1)), model.submit(row(2))
    await queued(s, 2)
    assert (await model.status()).problem == "the cluster has no worker"
    async with Worker(s.address):
        assert np.array_equal(await slow, row(2))
        assert np.array_equal(await fast, row(4))


@gen_cluster(
    client=True, nthreads=ONE_WORKER, config={"daskinfer.no-worker-warning": 0}
)
async def test_requests_that_nobody_can_serve_are_reported(c, s, a):
    with captured_logger("distributed.inference.plugin") as log:
        model = await deploy(c, Probe(), resources={"NPU": 1}, wait=False)
        future = model.submit(ONE)
        # The worker may not have been heard of when the first warning is given.
        await until(lambda: f"{a.address}: it lacks" in log.getvalue())
    said = log.getvalue()
    assert "1 request for 'm' is waiting" in said
    assert "needs NPU=1" in said
    assert f"{a.address}: it lacks NPU=1 (it has none)" in said
    assert future.status == "pending"
    async with Worker(s.address, resources={"NPU": 1}):
        assert np.array_equal(await future, 2 * ONE)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_of_a_worker_that_leaves_are_run_elsewhere(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.close()
    futures = model.map([row(i) for i in range(10)])
    await until(lambda: busy(s) == {a.address, b.address})
    await s.remove_worker(a.address, stimulus_id="test", close=False)
    await until(lambda: busy(s) == {b.address})
    probe.open()
    for i, y in enumerate(await daskinfer.gather(futures)):
        assert np.array_equal(y, row(2 * i))
    infos = [await daskinfer.info(future) for future in futures]
    assert {info.worker for info in infos} == {b.address}
    assert {info.attempts for info in infos} == {1, 2}


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_result_whose_worker_leaves_is_computed_again(c, s, a, b):
    model = await deploy(c, Probe(), warmup=ONE)
    future = model.options(workers=[a.address], allow_other_workers=True).submit(ONE)
    await future
    await a.close()
    await until(lambda: s.tasks[future.key].state == "memory")
    assert np.array_equal(await future, 2 * ONE)
    assert (await daskinfer.info(future)).worker == b.address
    status = await model.status()
    assert (status.requests, status.successes) == (2, 2)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_paused_worker_is_given_no_batch(c, s, a, b):
    model = await deploy(c, Probe(), warmup=ONE)
    pause(a)
    await until(lambda: s.workers[a.address].status == Status.paused)
    futures = model.map([row(i) for i in range(20)])
    await wait(futures)
    assert {(await daskinfer.info(f)).worker for f in futures} == {b.address}
    healthy = {w.address: w.healthy for w in (await model.status()).workers}
    assert healthy == {a.address: False, b.address: True}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_requests_wait_for_a_worker_that_resumes(c, s, a):
    model = await deploy(c, Probe(), warmup=ONE)
    pause(a)
    await until(lambda: s.workers[a.address].status == Status.paused)
    future = model.submit(ONE)
    await queued(s, 1)
    problem = (await model.status()).problem
    assert problem == "every ready worker is paused or closing"
    a.status = Status.running
    assert np.array_equal(await future, 2 * ONE)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_worker_that_is_paused_with_a_batch_finishes_it(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.close()
    future = model.submit(ONE)
    await until(lambda: busy(s))
    pause(a)
    await until(lambda: s.workers[a.address].status == Status.paused)
    probe.open()
    assert np.array_equal(await future, 2 * ONE)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_worker_that_retires_hands_its_results_and_requests_on(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    here = model.options(workers=[a.address], allow_other_workers=True)
    done = here.map([row(i) for i in range(5)])
    await wait(done)
    probe.close()
    running = here.submit(row(10))
    await until(lambda: busy(s) == {a.address})
    retiring = asyncio.create_task(c.retire_workers([a.address]))
    await until(lambda: a.address not in s.workers)
    probe.open()
    await retiring
    for i, y in enumerate(await c.gather(done)):
        assert np.array_equal(y, row(2 * i))
    assert np.array_equal(await running, row(20))
    # The finished ones moved; only what was running is run again.
    assert sorted({args[0].item() for args, _ in probe.calls}) == [0, 1, 2, 3, 4, 10]
    assert len(probe.calls) <= 7


@gen_cluster(
    client=True,
    nthreads=ONE_WORKER,
    config={"distributed.scheduler.no-workers-timeout": "1ms"},
)
async def test_requests_outlive_the_time_out_for_tasks_without_workers(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.close()
    futures = model.map([row(i) for i in range(5)])
    await queued(s, 3)
    # Dask's own rule goes on for the others.
    hopeless = c.submit(inc, 1, resources={"NONE": 1})
    await until(lambda: hopeless.key in s.tasks)
    s._check_no_workers()
    await wait([hopeless])
    assert hopeless.status == "error"
    assert waiting(s) == 3
    probe.open()
    await wait(futures)
    assert {future.status for future in futures} == {"finished"}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_autoscaling_sees_device_time_not_requests(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    target = s.handlers["adaptive_target"]
    probe.close()
    futures = model.map([row(i) for i in range(1000)])
    await until(lambda: len(engine(s).requests) == 1000)
    # Microseconds each: Dask would take them for half a second, and start a hundred.
    assert target() == 1
    # At a millisecond a request, of which the cluster wants a tenth done by each.
    seconds = engine(s).dispatcher.lines.waiting_seconds()
    assert 0 < seconds < parse_timedelta("5s")
    assert s.workers_to_close() == []
    probe.open()
    await wait(futures)


@gen_cluster(client=True, nthreads=[])
async def test_autoscaling_starts_a_worker_for_the_first_request(c, s):
    model = await deploy(c, Probe(), wait=False)
    assert s.handlers["adaptive_target"]() == 0
    future = model.submit(ONE)
    await queued(s, 1)
    assert s.handlers["adaptive_target"]() == 1
    del future


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_worker_with_a_batch_is_not_closed_as_idle(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.close()
    future = model.options(workers=[a.address]).submit(ONE)
    await until(lambda: busy(s) == {a.address})
    assert s.workers_to_close(n=2) == [b.address]
    assert s.handlers["adaptive_target"]() == 1
    probe.open()
    await future
    del future
    await nothing_is_left(s, a, b)
    assert set(s.workers_to_close(n=2)) == {a.address, b.address}


@gen_cluster(
    client=True,
    nthreads=TWO_WORKERS,
    Worker=Nanny,
    timeout=60,
)
async def test_a_worker_killed_in_mid_batch_costs_no_answer(c, s, a, b):
    def answer(x):
        import os

        if (x == 13).any():
            os._exit(1)
        return x + 1

    model = await deploy(c, answer)
    futures = model.map([row(i) for i in range(13)])
    deadly = model.submit(row(13))
    for i, y in enumerate(await daskinfer.gather(futures)):
        assert np.array_equal(y, row(i + 1))
    await wait([deadly])
    assert isinstance(await deadly.exception(), KilledWorker)
    assert np.array_equal(await model.submit(row(20)), row(21))
