"""Clusters that ``Adaptive`` scales: up with what waits, down when it is quiet."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dask
import numpy as np
import pytest
import torch
from distributed import Client, Event, LocalCluster, Scheduler, Worker, wait
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils_test import gen_cluster, gen_test, inc

import daskinfer
from scheduler_plugins import closing, elasticity
from tests.cluster.helpers import Builder, Probe, build, until
from tests.cluster.http_helpers import ask_json, scrape
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = ONE_WORKER * 2
QUICK = {
    "daskinfer.elasticity.target-delay": "100ms",
    "daskinfer.elasticity.cool-down": "500ms",
}
#: Of a forward pass.
SECONDS = 0.02


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure how busy devices are over a shorter time, which tests wait for."""
    monkeypatch.setattr(elasticity, "WINDOW", 1.0)


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def busy(scheduler: Scheduler) -> set[str]:
    return engine(scheduler).dispatcher.running.workers()


class Watch(SchedulerPlugin):
    """Notes who leaves, and with what."""

    name = "watch"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.left: list[str] = []
        self.interrupted: list[str] = []
        #: How many workers there were when one was to leave.
        self.most = 0
        scheduler.add_plugin(self)

    def add_worker(self, scheduler, worker):
        self.most = max(self.most, len(scheduler.workers))

    def log_event(self, topic, msg):
        if isinstance(msg, dict) and msg.get("status") == "closing_gracefully":
            self.left.append(topic)
            if topic in busy(self.scheduler):
                self.interrupted.append(topic)


class Slow(torch.nn.Module):
    """Takes its time, as a large model does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return x * 2


@asynccontextmanager
async def adaptive(
    cluster: Any, interval: str = "50ms", **kwargs: Any
) -> AsyncIterator[tuple[Client, Scheduler]]:
    async with cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(interval=interval, **kwargs)
        yield client, cluster.scheduler


def local_cluster(n_workers: int = 0) -> LocalCluster:
    """One whose workers are in this process, where tests can hold models back."""
    return LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        processes=False,
        asynchronous=True,
        dashboard_address=":0",
    )


async def polls(scheduler: Scheduler, count: int) -> None:
    """Wait until the cluster has asked so many times more for its size."""
    own, asked = scheduler.handlers["adaptive_target"], 0

    def counted(*args: Any, **kwargs: Any) -> int:
        nonlocal asked
        asked += 1
        return own(*args, **kwargs)

    scheduler.handlers["adaptive_target"] = counted
    try:
        await until(lambda: asked >= count)
    finally:
        scheduler.handlers["adaptive_target"] = own


@gen_test(timeout=120)
async def test_from_none_through_a_burst_and_a_lull_to_none_and_back():
    probe = Probe(lambda x: (time.sleep(SECONDS), x * 2)[1])
    with dask.config.set(QUICK):
        async with adaptive(local_cluster(), minimum=0, maximum=3) as (c, s):
            # Nobody is there: who deploys needs somebody to load it.
            model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
            watch = Watch(s)
            assert len(s.workers) == 1
            warmed = len(probe.calls)
            futures = model.map([row(i) for i in range(300)])
            await until(lambda: len(s.workers) == 3)
            answers = await daskinfer.gather(futures)
            assert [float(y[0, 0]) for y in answers] == [2.0 * i for i in range(300)]
            assert watch.most == 3
            loads = engine(s).registry.version("m").loads.total()
            # Each request ran once: nobody was interrupted.
            once = probe.calls[warmed:]
            assert len([a for a, _ in once if a[0][0, 0] > 1]) == 298
            del futures, answers
            await until(lambda: not s.workers)
            assert watch.interrupted == [] and len(watch.left) >= 3
            assert engine(s).scaling.target.workers == 0
            again = model.submit(row(5))
            assert np.array_equal(await again, row(10))
            assert len(s.workers) >= 1
            assert engine(s).registry.version("m").loads.total() > loads


@pytest.mark.process
@gen_test(timeout=240)
async def test_worker_processes_through_a_burst_and_a_lull():
    options = {"device": "cpu", "threads_per_worker": 1, "dashboard_address": ":0"}
    with dask.config.set(QUICK):
        cluster = daskinfer.LocalCluster(1, asynchronous=True, **options)
        async with adaptive(cluster, "100ms", minimum=1, maximum=2) as (c, s):
            model = await deploy(c, Slow(), max_batch_size=1, warmup=torch.ones(1, 1))
            watch = Watch(s)
            futures = model.map([torch.full((1, 1), float(i)) for i in range(200)])
            answers = await daskinfer.gather(futures)
            assert [float(y[0, 0]) for y in answers] == [2.0 * i for i in range(200)]
            # The second one may come when all is done.
            await until(lambda: watch.most == 2)
            del futures, answers
            await until(lambda: len(s.workers) == 1)
            assert watch.interrupted == []
            # And stays, as that is the minimum.
            await polls(s, 20)
            assert len(s.workers) == 1
            assert np.array_equal(await model.submit(torch.ones(1, 1)), 2 * ONE)


@gen_test(timeout=120)
async def test_a_worker_with_a_batch_stays_for_as_long_as_it_takes():
    probe = Probe()
    settings = {**QUICK, "daskinfer.elasticity.cool-down": "0s"}
    with dask.config.set(settings):
        async with adaptive(local_cluster(4), minimum=4) as (c, s):
            model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
            probe.close()
            probe.calls.clear()
            future = model.submit(row(3))
            await until(lambda: len(busy(s)) == 1)
            (address,) = busy(s)
            watch = Watch(s)
            c.cluster.adapt(minimum=0, interval="20ms")
            # One more than it takes, perhaps, to be there for the next request.
            await until(lambda: len(s.workers) <= 2)
            await polls(s, 20)
            assert address in s.workers
            probe.open()
            assert np.array_equal(await future, row(6))
            assert len(probe.calls) == 1
            del future
            await until(lambda: not s.workers)
            assert watch.interrupted == []


@gen_test(timeout=120)
async def test_the_last_worker_stays_until_the_cool_down_is_over():
    settings = {**QUICK, "daskinfer.elasticity.cool-down": "1h"}
    with dask.config.set(settings):
        async with adaptive(local_cluster(3), "20ms", minimum=0) as (c, s):
            model = await deploy(c, Probe(), warmup=ONE)
            await until(lambda: len(s.workers) == 1)
            await polls(s, 20)
            assert len(s.workers) == 1
            future = model.submit(ONE)
            await wait(future)
            # As if an hour had passed. But it holds a result that somebody wants.
            engine(s).scaling._policy.cool_down = 0.0
            await polls(s, 20)
            assert len(s.workers) == 1
            assert np.array_equal(await future, 2 * ONE)
            del future
            await until(lambda: not s.workers)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=QUICK)
async def test_what_waits_is_worth_workers_and_says_so(c, s, a):
    gate = threading.Event()

    def slow(x):
        time.sleep(SECONDS)
        assert x[0, 0] < 0 or gate.wait(30)
        return x

    model = await deploy(c, Probe(slow), max_batch_size=1, warmup=row(-1))
    futures = model.map([row(i) for i in range(100)])
    await queued(s, 98)
    target = s.handlers["adaptive_target"]()
    # Two seconds of work, to be done in a tenth of one; and one request each at most.
    assert 15 <= target <= 99
    assert s.adaptive_target() >= 15
    _, told = await ask_json(s, "/inference/status.json")
    told = told["elasticity"]
    assert told["wanted"] >= 15 and "what waited took" in told["reason"]
    assert (told["workers"], told["serving"], told["waiting"]) == (1, 1, 98)
    pytest.importorskip("prometheus_client")
    assert (await scrape(s))("workers_wanted") >= 15
    gate.set()
    await wait(futures)
    del futures
    await nothing_is_left(s, a)
    await until(lambda: s.handlers["adaptive_target"]() == 0)


@gen_cluster(client=True, nthreads=TWO_WORKERS, config=QUICK)
async def test_workers_that_load_are_on_their_way(c, s, a, b):
    builder = Builder(is_open=False)
    factory = f"{build.__module__}:{build.__name__}"
    model = await deploy(
        c, None, factory=factory, factory_kwargs={"builder": builder}, wait=False
    )
    x = np.ones((1, 4), "f4")
    futures = [model.submit(x) for _ in range(20)]
    await queued(s, 20)
    target = s.handlers["adaptive_target"]
    assert 1 <= target() <= 2
    demand = engine(s).scaling.demand
    assert (demand.serving, demand.coming, demand.unserved) == (0, 2, False)
    builder.open()
    await wait(futures)
    assert engine(s).scaling.report()["serving"] == 2


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1, {"resources": {"NPU": 1}}), ("127.0.0.1", 1)],
    config={"daskinfer.elasticity.cool-down": "0s"},
)
async def test_the_last_that_serves_is_kept_rather_than_another(c, s, a, b):
    model = await deploy(c, Probe(), warmup=ONE, resources={"NPU": 1})
    assert np.array_equal(await model.submit(ONE), 2 * ONE)
    await nothing_is_left(s, a, b)
    # It holds more, which Dask would go by.
    kept = await c.scatter({"kept": np.ones(10)}, workers=[b.address])
    assert s.workers_to_close(target=1) == [b.address]
    assert s.workers_to_close(n=1) == [b.address]
    # A user's task is no reason to close the last one instead, nor to be closed.
    release = Event("release")
    running = c.submit(lambda: Event("release").wait(), workers=[b.address])
    await until(lambda: running.key in s.tasks and s.workers[b.address].processing)
    assert s.workers_to_close(target=1) == []
    # None is to remain.
    assert a.address in s.workers_to_close(target=0)
    await release.set()
    await running
    del kept


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1, {"resources": {"NPU": 1}})])
async def test_a_worker_that_cannot_serve_it_is_tried_once(c, s, a):
    model = await deploy(c, Probe(), resources={"GPU": 1}, wait=False)
    future = model.submit(ONE)
    await queued(s, 1)
    target = s.handlers["adaptive_target"]
    assert target() == 2
    async with Worker(s.address) as b:
        await until(lambda: b.address in engine(s).registry.workers)
        assert target() == 2
        assert engine(s).scaling.target.reason == "no worker serves what is asked for"
        async with Worker(s.address, resources={"GPU": 1}):
            assert np.array_equal(await future, 2 * ONE)


@gen_cluster(client=True, nthreads=TWO_WORKERS, timeout=60)
async def test_who_is_about_to_leave_is_given_no_requests(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    held = closing.HELD_OUT
    closing.HELD_OUT = 60.0
    try:
        (named,) = s.handlers["workers_to_close"](target=1, attribute="name")
    finally:
        closing.HELD_OUT = held
    leaving = next(w for w in (a, b) if w.name == named)
    staying = b if leaving is a else a
    probe.close()
    futures = model.map([row(i) for i in range(5)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    await queued(s, 3)
    assert busy(s) == {staying.address}
    # The cluster has thought better of it.
    engine(s).scaling.named([])
    await until(lambda: busy(s) == {a.address, b.address})
    probe.open()
    await wait(futures)


@gen_cluster(client=True, nthreads=[])
async def test_users_tasks_count_as_before_where_there_is_nobody(c, s):
    await deploy(c, Probe(), wait=False)
    futures = c.map(inc, range(50))
    await until(lambda: len(s.tasks) == 50)
    expected = Scheduler.adaptive_target(s, target_duration="1s")
    assert expected > 1
    assert s.handlers["adaptive_target"](target_duration="1s") == expected
    del futures


@gen_cluster(
    client=True,
    nthreads=TWO_WORKERS,
    config={"distributed.scheduler.default-task-durations": {"long": "1000s"}},
)
async def test_requests_do_not_change_what_users_tasks_are_worth(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=16, warmup=ONE)
    long = c.submit(lambda: Event("end").wait(), key="long-1", workers=[a.address])
    await until(lambda: s.workers[a.address].processing)
    # One task can be run by one worker only, however long it takes.
    assert s.handlers["adaptive_target"]() == 1
    probe.close()
    here = model.options(workers=[a.address])
    requests = here.map([row(i) for i in range(60)])
    await until(lambda: busy(s) == {a.address})
    assert s.handlers["adaptive_target"]() == 1
    probe.open()
    await wait(requests)
    await Event("end").set()
    await long
