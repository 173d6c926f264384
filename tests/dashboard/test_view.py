"""What the page shows, as plain rows."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from distributed import Client
from distributed.metrics import monotonic
from distributed.utils_test import gen_cluster

import daskinfer
from scheduler_plugins import dask_setup
from scheduler_plugins.dashboard import view
from scheduler_plugins.dashboard.feed import Feed
from scheduler_plugins.dashboard.history import INTERVAL, SPAN, History, Rate
from scheduler_plugins.dashboard.selector import Selector
from scheduler_plugins.dashboard.summary import html
from scheduler_plugins.dashboard.throughput import Throughput
from scheduler_plugins.dashboard.view import DeploymentRow
from scheduler_plugins.occupation import busy_seconds
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine
from tests.dashboard.fleet import GIB, KIND, Fleet


@asynccontextmanager
async def fleet_of(scheduler: Any, workers: int) -> AsyncIterator[Fleet]:
    await dask_setup(scheduler)
    fleet = Fleet(scheduler, workers)
    try:
        yield fleet
    finally:
        fleet.take()
        fleet.leave()


def with_fleet(workers: int) -> Callable[..., Any]:
    """Run a test with a scheduler that has so many workers in its state alone."""

    def decorate(test: Callable[[Fleet], Coroutine[Any, Any, None]]) -> Any:
        # Its arguments are no fixtures.
        async def run(scheduler: Any) -> None:
            async with fleet_of(scheduler, workers) as fleet:
                await test(fleet)

        run.__name__ = run.__qualname__ = test.__name__
        return gen_cluster(nthreads=[])(run)

    return decorate


class Clock:
    """A time that only the test moves."""

    def __init__(self) -> None:
        self.now = monotonic()

    def __call__(self) -> float:
        return self.now


# One moment


@with_fleet(3)
async def test_nothing_has_happened_yet(fleet: Fleet) -> None:
    (row,) = view.deployments(fleet.plugin, monotonic())
    assert (row.name, row.version, row.state) == ("resnet50", "1", "ready")
    assert (row.ready, row.workers, row.requests, row.throughput) == (3, 3, 0, 0.0)
    assert (row.waiting, row.oldest, row.latency.p50) == (0, 0.0, None)


@gen_cluster(client=True)
async def test_retries_and_failures_by_kind(c: Any, s: Any, a: Any, b: Any) -> None:
    failures = iter([OSError("for once"), None, ValueError("bad")])

    def fails(x: Any) -> Any:
        if (error := next(failures, None)) is not None:
            raise error
        return x

    model = await deploy(c, Probe(fails), max_batch_size=1)
    await model.options(retries=1).submit(ONE)
    with pytest.raises(ValueError, match="bad"):
        await model.submit(ONE)
    (row,) = view.deployments(engine(s), monotonic())
    assert (row.retries, row.failed_by) == (1, {"model": 1})
    assert "failed: 1 model" in html(row, None)
    assert "1 / 0" in html(row, None)


@with_fleet(3)
async def test_how_many_workers_are_wanted_and_why(fleet: Fleet) -> None:
    for address in fleet.addresses:
        fleet.run(address, seconds_ago=0.0)
    # What one device needs a minute for, and may not wait for more than seconds.
    fleet.ask(60 * 5000)
    feed = Feed(fleet.plugin)
    feed.look()
    assert feed.target.workers > 10
    assert feed.target == fleet.plugin.scaling.target
    told = html(feed.rows["resnet50"], None, feed.target)
    assert ">workers wanted</div>" in told and f">{feed.target.workers}<" in told
    assert f'title="{feed.target.reason}"' in told and "what waited" in told


@with_fleet(3)
async def test_counts_are_those_of_the_plugin(fleet: Fleet) -> None:
    fleet.answer(1.0)
    (row,) = view.deployments(fleet.plugin, monotonic())
    counts = fleet.line.counts
    assert row.requests == row.successes == row.rows == counts.rows
    assert row.passes == counts.passes
    assert row.rows_by_worker == {a: w.rows for a, w in counts.workers.items()}
    assert row.latency == counts.latency()
    assert row.best_size == fleet.line.batcher.best_size(fleet.line.device_class)


@with_fleet(1)
async def test_the_oldest_wait(fleet: Fleet) -> None:
    fleet.ask(2, seconds_ago=1.0)
    fleet.ask(3, seconds_ago=5.0)
    (row,) = view.deployments(fleet.plugin, monotonic())
    assert row.waiting == 5
    assert 5.0 <= row.oldest < 5.0 + 30.0


@with_fleet(2)
async def test_a_deployment_that_nobody_serves(fleet: Fleet) -> None:
    for address in fleet.addresses:
        fleet.plugin.registry.failed("resnet50", "1", address, "no <disk>", None)
    (row,) = view.deployments(fleet.plugin, monotonic())
    assert (row.state, row.ready, row.workers) == ("not ready", 0, 2)
    assert row.problem is not None and "no <disk>" in row.problem


@with_fleet(2)
async def test_requests_that_are_not_served(fleet: Fleet) -> None:
    now = monotonic()
    for address in fleet.addresses:
        fleet.line.health.open(address, now, "it was late")
    fleet.ask(1)
    (row,) = view.deployments(fleet.plugin, now)
    assert (row.state, row.ready) == ("waiting", 2)
    assert row.problem is not None and "it was late" in row.problem


@with_fleet(0)
async def test_deployments_are_in_the_order_of_their_names(fleet: Fleet) -> None:
    fleet.deploy("bert")
    rows = view.deployments(fleet.plugin, monotonic())
    assert [row.name for row in rows] == ["bert", "resnet50"]


@with_fleet(3)
async def test_workers_that_need_attention_come_first(fleet: Fleet) -> None:
    bad = fleet.addresses[2]
    fleet.line.health.open(bad, monotonic(), "it was late")
    found = view.status(fleet.plugin, "resnet50")
    assert found is not None
    rows = view.workers(fleet.plugin, found)
    assert [row.status.address for row in rows] == [bad, *fleet.addresses[:2]]
    first = rows[0].status
    assert (first.breaker, first.healthy) == ("open", False)
    assert first.reason is not None and "it was late" in first.reason


@with_fleet(2)
async def test_memory_is_the_devices_where_that_is_known(fleet: Fleet) -> None:
    one, other = fleet.addresses
    workers = fleet.scheduler.workers
    told = {"memory-used": 3 * GIB, "memory-total": 64 * GIB, "utilization": 40}
    workers[one].metrics["npu"] = told
    # As before anything was loaded on it.
    workers[other].metrics["npu"] = {"memory-used": None, "utilization": None}
    workers[other].metrics["memory"] = 5 * GIB
    found = view.status(fleet.plugin, "resnet50")
    assert found is not None
    rows = {row.status.address: row for row in view.workers(fleet.plugin, found)}
    device, process = rows[one], rows[other]
    assert (device.memory_of, device.utilization) == ("device", 0.4)
    assert (device.memory, device.memory_limit) == (3 * GIB, 64 * GIB)
    assert (process.memory_of, process.utilization) == ("process", None)
    assert (process.memory, process.memory_limit) == (5 * GIB, 64 * GIB)


@with_fleet(1)
async def test_what_is_not_deployed_has_no_status(fleet: Fleet) -> None:
    assert view.status(fleet.plugin, "gone") is None


@with_fleet(2)
async def test_a_batch_that_runs_counts_as_it_goes(fleet: Fleet) -> None:
    busy, idle = fleet.addresses
    fleet.run(busy, seconds_ago=3.0)
    now = monotonic()
    seconds = busy_seconds(fleet.plugin, now)
    assert seconds[idle] == 0.0
    assert 2.5 < seconds[busy] < 3.0 + 30.0
    later = busy_seconds(fleet.plugin, now + 1.0)
    assert later[busy] - seconds[busy] == pytest.approx(1.0)


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_canary_and_what_it_is_given(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, Probe(), name="m")
    await model.update(Probe(), version="2", traffic=0.25)
    plugin = scheduler.plugins["daskinfer"]
    (row,) = view.deployments(plugin, monotonic())
    assert (row.version, row.state) == ("1", "canary 2")
    found = view.status(plugin, "m")
    assert found is not None
    stages = {v.version: (v.stage, v.share) for v in found.versions}
    assert stages == {"1": ("active", 0.0), "2": ("canary", 0.25)}


# What is learned


@with_fleet(1)
async def test_the_best_size_is_on_the_learned_curve(fleet: Fleet) -> None:
    line, (address,) = fleet.line, fleet.addresses
    # One size was measured far too fast, once: that is no size to go by.
    line.latency.seed(address, KIND, [(1, 0.0042), (2, 0.0044), (12, 0.0001)])
    feed = Feed(fleet.plugin, Clock())
    feed.look()
    selector = Selector(feed)
    selector.update()
    part = Throughput(feed, selector)
    part.update()
    (rows,), (rate,) = part.best.data["rows"], part.best.data["rate"]
    assert rows == line.batcher.best_size(KIND)
    assert rate == pytest.approx(rows / line.latency.curve(KIND).at(rows))
    # It is a point of the line that is drawn, and not of what is off.
    (sizes,), (rates,) = part.curves.data["rows"], part.curves.data["rates"]
    assert dict(zip(sizes, rates, strict=True))[rows] == rate
    points = part.source.data
    assert points["rows"] == [size for size, _, _ in line.latency.table(KIND)]
    assert max(points["rate"]) > 10 * max(rates)


# Over time


def row(answered: int = 0, **about: Any) -> DeploymentRow:
    return DeploymentRow("m", "1", successes=answered, **about)


def test_the_past_is_bounded() -> None:
    history = History()
    for tick in range(10_000):
        history.add(tick * INTERVAL, row(answered=tick))
    at = history.columns(now=10_000 * INTERVAL)["at"]
    assert len(at) == SPAN / INTERVAL
    assert min(at) >= -SPAN - INTERVAL


def test_lines_are_broken_where_nobody_looked() -> None:
    history = History()
    history.add(0.0, row(answered=0))
    history.add(0.5, row(answered=10))
    history.add(60.0, row(answered=5000))
    history.add(60.5, row(answered=5010))
    answered = history.columns(now=60.5)["answered"]
    assert [None if math.isnan(value) else value for value in answered] == [
        *(None, 20.0),
        None,
        # What happened meanwhile is no rate of now.
        *(None, 20.0),
    ]


def test_batches_are_averaged_over_the_passes_of_late() -> None:
    history = History()
    history.add(0.0, row(passes=100, rows=100))
    history.add(0.5, row(passes=102, rows=164))
    assert history.columns(now=0.5)["batch_size"][-1] == 32


def test_shares_are_those_of_the_rows_of_late() -> None:
    history = History()
    history.add(0.0, row(rows_by_worker={"a": 1000}))
    history.add(0.5, row(rows_by_worker={"a": 1010, "b": 30}))
    assert history.shares() == {"a": 0.25, "b": 0.75}


def test_nobody_has_a_share_of_nothing() -> None:
    history = History()
    history.add(0.0, row(rows_by_worker={"a": 5}))
    assert history.shares() == {}


def test_a_counter_that_began_anew_has_not_shrunk() -> None:
    rate = Rate(3)
    rate.add(0.0, {"a": 100.0})
    rate.add(1.0, {"a": 4.0})
    assert rate.grown() == {"a": 0.0}


# Who looks


@with_fleet(2)
async def test_nothing_is_read_while_nobody_looks(fleet: Fleet) -> None:
    feed = Feed(fleet.plugin, Clock())
    fleet.answer(1.0)
    assert feed.rows == {} and feed.history("resnet50")["at"] == []


@with_fleet(2)
async def test_many_who_look_cost_no_more_than_one(fleet: Fleet) -> None:
    clock = Clock()
    feed = Feed(fleet.plugin, clock)
    for _ in range(5):
        feed.look()
    assert len(feed.history("resnet50")["at"]) == 1
    clock.now += INTERVAL
    for _ in range(5):
        feed.look()
    assert len(feed.history("resnet50")["at"]) == 2


@with_fleet(2)
async def test_how_busy_workers_are(fleet: Fleet) -> None:
    clock = Clock()
    feed = Feed(fleet.plugin, clock)
    feed.look()
    clock.now += 2.0
    one, other = fleet.addresses
    fleet.line.counts.ran(one, [(8, 8, 0.25)] * 4)
    fleet.line.counts.ran(other, [(8, 8, 0.25)] * 2)
    feed.look()
    assert feed.busy() == {one: 0.5, other: 0.25}
    assert feed.shares("resnet50") == {one: 32 / 48, other: 16 / 48}


@with_fleet(1)
async def test_what_was_undeployed_is_forgotten(fleet: Fleet) -> None:
    clock = Clock()
    feed = Feed(fleet.plugin, clock)
    feed.look()
    fleet.plugin.registry.remove("resnet50")
    fleet.plugin.dispatcher.close("resnet50", "1")
    clock.now += INTERVAL
    feed.look()
    assert feed.rows == {} and feed.history("resnet50")["at"] == []
    assert feed.status("resnet50") is None and feed.workers("resnet50") == []


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_caches_are_asked_in_the_background(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(
        client, Probe(), name="m", cache=daskinfer.CachePolicy()
    )
    import numpy as np

    for _ in range(3):
        await model.submit(np.ones((1, 2)))
    feed = Feed(scheduler.plugins["daskinfer"])
    feed.look()
    assert feed.cache("m") is None
    await until(lambda: feed.cache("m") is not None)
    told, known = feed.cache("m"), (await model.status()).cache
    assert told is not None and known is not None
    assert told.results.misses == known.results.misses > 0
    feed.close()


def test_nothing_of_it_needs_bokeh() -> None:
    code = (
        "import sys; sys.modules['bokeh'] = None;"
        "import scheduler_plugins, scheduler_plugins.dashboard.feed"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
