"""Figures for Prometheus: every end of a request is counted once."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Nanny, Scheduler, Worker, wait
from distributed.utils_test import captured_logger, gen_cluster

import daskinfer
from daskinfer import RetryPolicy
from daskinfer.caching import CachePolicy
from scheduler_plugins.outcomes import FAILURES
from scheduler_plugins.placement import Placement
from tests.cluster.cache_helpers import until_stored
from tests.cluster.helpers import Probe, linear, until
from tests.cluster.http_helpers import Scrape, ask, ends, scrape
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

pytest.importorskip("prometheus_client")

pytestmark = pytest.mark.smoke

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2

#: Gauges that say what goes on now.
MOMENTARY = (
    "queue_length",
    "queue_wait_seconds",
    "in_flight_requests",
    "in_flight_batches",
)


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_answers(c, s, a):
    model = await deploy(c, linear(), max_batch_size=8, warmup=np.ones((1, 4), "f4"))
    xs = [np.full((2, 4), i, "f4") for i in range(100)]
    await wait(model.map(xs))
    figures = await scrape(s)
    about = {"deployment": "m", "version": "1"}
    assert ends(figures) == {("answered", "computed"): 100}
    assert figures("requests_received_total", deployment="m") == 100
    assert figures("request_duration_seconds_count", **about) == 100
    assert figures("request_wait_seconds_count", **about) == 100
    waited = figures("request_wait_seconds_sum")
    assert 0 < waited < figures("request_duration_seconds_sum")
    batches = figures("batches_sent_total", **about)
    assert 25 <= batches <= 100
    assert batches == figures("batch_execution_seconds_count", **about)
    told = figures.by("outcome", "version_requests_total", **about)
    assert told == {"answered": 100}
    assert figures("rows_total", **about) == figures("pass_rows_sum") == 200
    assert figures("pass_rows_bucket", le="8.0") == figures("pass_rows_count")
    assert figures("pass_rows_bucket", le="1.0") == 0
    assert figures("padded_rows_total") == 0
    # Warmed up, so that all was predicted.
    assert figures("prediction_ratio_count") == batches
    predicted = figures("predicted_seconds_total")
    measured = figures("measured_seconds_total")
    assert predicted > 0 and measured > 0
    assert figures("replicas", state="ready", **about) == 1
    assert figures("ready", deployment="m") == 1
    assert figures.by("stage", "version_stage", **about) == {"active": 1}
    assert 1 <= figures("best_batch_size", **about) <= 8
    [load] = figures.matching("model_load_seconds", **about, worker=a.address)
    assert load.value > 0
    [breaker] = figures.matching("breaker_state", **about, worker=a.address)
    assert breaker.value == 0
    assert figures("worker_rows_total", deployment="m", worker=a.address) == 200
    assert figures("worker_busy_seconds_total") > 0
    assert {name: figures(name) for name in MOMENTARY} == dict.fromkeys(MOMENTARY, 0)
    assert figures("retries_total") == figures("breaker_openings_total") == 0


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_waits_and_what_runs(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=4, warmup=ONE)
    probe.close()
    futures = model.map([row(i) for i in range(4)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 1)
    futures += model.map([row(i) for i in range(10)])
    await until(lambda: engine(s).dispatcher.lines.waiting("m") > 0)
    await until(lambda: len(engine(s).requests) == 14)
    figures = await scrape(s)
    waiting = figures("queue_length", deployment="m", version="1")
    running = figures("in_flight_requests", deployment="m", version="1")
    assert waiting + running == 14 and waiting >= 6
    assert figures("queue_wait_seconds") > 0
    assert 1 <= figures("in_flight_batches") <= 2
    assert ends(figures) == {}
    probe.open()
    await wait(futures)
    figures = await scrape(s)
    assert {name: figures(name) for name in MOMENTARY} == dict.fromkeys(MOMENTARY, 0)
    assert ends(figures) == {("answered", "computed"): 14}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_every_end_is_counted_once(c, s, a):
    def model_of(x: np.ndarray) -> np.ndarray:
        if (x < 0).any():
            raise ValueError("negative")
        return 2 * x

    probe = Probe(model_of)
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE, max_queue=10)
    sent = 0

    # Answered, and failed by the model.
    futures = model.map([row(i) for i in (1, 2, -3)])
    await wait(futures)
    sent += 3

    # Two at the device, ten wait: the others are turned away.
    probe.close()
    ahead = model.map([row(1), row(1)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    crowd = model.map([row(1) for _ in range(15)])
    await until(lambda: sum(f.status == "error" for f in crowd) == 5)
    sent += 17
    # Four of those that wait are cancelled.
    await c.cancel(crowd[:4])
    await queued(s, 6)
    # Two come with so little time that they fail, while they wait for the device.
    late = model.options(timeout="10ms").map([row(1), row(1)])
    await wait(late)
    sent += 2
    # One with inputs that Dask fails to compute, one with nonsense.
    broken = c.submit(model, c.submit(lambda: 1 / 0))
    nonsense = c.submit(daskinfer.Model("nobody"), row(1))
    await wait([broken, nonsense])
    sent += 2
    figures = await scrape(s)
    assert ends(figures) == {
        ("answered", "computed"): 2,
        ("failed", "model"): 1,
        ("failed", "overloaded"): 5,
        ("failed", "deadline"): 2,
        ("failed", "dask"): 1,
        ("failed", "unknown_deployment"): 1,
        ("cancelled", "released"): 4,
    }
    assert figures("requests_total", deployment="") == 1
    left = figures("queue_length") + figures("in_flight_requests")
    assert left == 8
    assert sum(ends(figures).values()) + left == sent
    # One that is unknown to all deployments arrived at none.
    assert figures("requests_received_total") == sent - 1

    # Those that wait fail with the deployment, those at the device are answered.
    undeployed = asyncio.create_task(c.scheduler.daskinfer_undeploy(name="m"))
    await until(lambda: sum(f.status == "error" for f in crowd) == 11)
    probe.open()
    await undeployed
    await wait(ahead)
    figures = await scrape(s)
    # The counters of the deployment went with it: these ended after it.
    assert ends(figures) == {
        ("failed", "unknown_deployment"): 1 + 6,
        ("answered", "computed"): 2,
    }
    assert figures.values("deployment") == {""}
    reasons = {reason for outcome, reason in ends(figures) if outcome == "failed"}
    assert reasons <= set(FAILURES)


class Undecided(Placement):
    """Takes none."""

    def choose(self, candidates: Any, now: float) -> Any:
        raise ZeroDivisionError("no idea")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_reasons(c, s, a):
    async def ended(future: Any, deployment: str) -> dict[tuple[str, str], float]:
        await wait(future)
        return ends(await scrape(s), deployment=deployment)

    sound = await deploy(c, Probe(), "sound")
    with dask.annotate(daskinfer={"nonsense": 1}):
        future = c.submit(sound, row(1))
    assert await ended(future, "sound") == {("failed", "inputs"): 1}
    await sound.undeploy()

    undecided = await deploy(c, Probe(), "undecided", placement=Undecided)
    future = undecided.submit(row(1))
    assert await ended(future, "undecided") == {("failed", "placement"): 1}

    lonely = await deploy(c, Probe(), "lonely", resources={"NPU": 1}, wait=False)
    future = lonely.options(timeout="20ms").submit(row(1))
    assert await ended(future, "lonely") == {("failed", "no_ready_worker"): 1}

    engine(s).submit(c.id, ["a", "b"], name="lonely", nonsense=True)
    figures = await scrape(s)
    assert figures("requests_total", deployment="lonely", reason="refused") == 2
    assert figures("requests_received_total", deployment="lonely") == 3
    engine(s).submit(c.id, ["c"], name=["no", "name"], nonsense=True)
    figures = await scrape(s)
    assert figures("requests_total", deployment="", reason="refused") == 1


@gen_cluster(client=True, nthreads=TWO_WORKERS, Worker=Nanny, timeout=120)
async def test_workers_that_die(c, s, a, b):
    def answer(x: np.ndarray) -> np.ndarray:
        import os

        if (x == 13).any():
            os._exit(1)
        return x + 1

    once = RetryPolicy(max_attempts=1)
    model = await deploy(c, answer, max_batch_size=64, retry=once)
    futures = model.map([row(i) for i in range(64)])
    await wait(futures)
    await until(lambda: len(engine(s).registry.can_answer("m")) == 2)
    figures = await scrape(s)
    # What a worker has answered, and nobody has fetched, is computed again.
    received = figures("requests_received_total")
    assert received >= 64
    assert ends(figures) == {
        ("answered", "computed"): received - 1,
        ("failed", "worker_lost"): 1,
    }
    assert figures("attempts_interrupted_total", reason="worker_lost") > 0
    assert figures("retries_total") > 0
    # Those that may be the cause.
    assert figures.by("reason", "batches_sent_total")["alone"] > 0
    # No figure of a worker that is gone.
    alive = set(s.workers)
    assert figures.values("worker") <= alive
    assert figures("replicas", state="ready") == 2


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_no_figure_survives_its_worker(c, s, a, b):
    model = await deploy(c, Probe(), max_batch_size=1, warmup=ONE)
    await wait(model.map([row(i) for i in range(50)]))
    assert (await scrape(s)).values("worker") == {a.address, b.address}
    await b.close()
    await until(lambda: b.address not in s.workers)
    figures = await scrape(s)
    assert figures.values("worker") == {a.address}
    assert figures("replicas") == 1
    # What it has done stays counted.
    assert figures("requests_total") == 50


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_no_figure_survives_its_version(c, s, a):
    model = await deploy(c, Probe(), max_batch_size=1, warmup=ONE)
    await model.submit(row(1))
    await model.update(Probe(), version="2", keep_previous=False)
    await model.submit(row(1))
    await until(lambda: ("m", "1") not in engine(s).dispatcher.lines)
    figures = await scrape(s)
    assert figures.values("version") == {"2"}
    assert figures("requests_total", deployment="m") == 2
    await model.undeploy()
    figures = await scrape(s)
    assert figures.values("deployment") <= {""}
    assert figures.values("worker") == {a.address}  # by the worker itself
    assert {name: figures(name) for name in MOMENTARY} == dict.fromkeys(MOMENTARY, 0)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_restart_cancels_what_is_under_way(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.close()
    futures = model.map([row(i) for i in range(9)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    await c.restart(wait_for_workers=False)
    probe.open()
    figures = await scrape(s)
    assert sum(ends(figures).values()) == 9
    assert {outcome for outcome, _ in ends(figures)} == {"cancelled"}
    assert {name: figures(name) for name in MOMENTARY} == dict.fromkeys(MOMENTARY, 0)
    del futures


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_results_that_are_computed_again_count_again(c, s, a):
    model = await deploy(c, Probe(), max_batch_size=1, warmup=ONE)
    future = c.submit(model, row(1))
    await future
    failing = await deploy(c, Probe(lambda x: 1 / 0), "f", max_batch_size=1)
    wrong = failing.submit(row(1))
    await wait(wrong)
    await wrong.retry()
    await wait(wrong)
    again = c.submit(failing, row(2), retries=2)
    await wait(again)
    figures = await scrape(s)
    assert figures("requests_received_total", deployment="m") == 1
    assert figures("requests_received_total", deployment="f") == 3
    assert ends(figures, deployment="f") == {("failed", "model"): 3}
    assert figures("retries_total", deployment="f") == 2


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_results_found_in_a_cache(c, s, a):
    model = await deploy(c, Probe(), max_batch_size=1, warmup=ONE, cache=CachePolicy())
    await model.submit(row(1))
    # Until then others wait for it, rather than find it.
    await until_stored(a)
    for _ in range(3):
        await model.submit(row(1))
    figures = await scrape(s)
    assert ends(figures) == {("answered", "computed"): 1, ("answered", "cached"): 3}
    about = {"deployment": "m", "worker": a.address, "tier": "host"}
    assert figures("cache_hits_total", **about) == 3
    assert figures("cache_entries", **about) == 1
    assert 0 < figures("cache_bytes", **about) < figures("cache_limit_bytes", **about)
    await model.undeploy()
    assert (await scrape(s))("cache_entries") == 0


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_workers_tell_of_themselves(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    figures = await scrape(a)
    assert figures.by("worker", "models_loaded") == {a.address: 1, b.address: 1}
    assert figures("batches_waiting") == 0
    # There is nothing to tell of a CPU.
    assert not any(
        name.startswith("dask_inference_device") for name in figures.families
    )
    await b.close()
    assert (await scrape(a)).by("worker", "models_loaded") == {a.address: 1}
    await model.undeploy()


@gen_cluster(
    client=True,
    nthreads=ONE_WORKER,
    config={"distributed.dashboard.prometheus.namespace": "mine"},
)
async def test_namespace(c, s, a):
    await deploy(c, Probe(), max_batch_size=1, warmup=ONE)
    text = (await ask(s, "/metrics")).body.decode()
    assert 'mine_inference_replicas{deployment="m"' in text
    assert "dask_inference_" not in text


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_names_are_escaped(c, s, a):
    name = 'a"b{c="d"}<script>'
    model = await deploy(c, Probe(), name, max_batch_size=1, warmup=ONE)
    await model.submit(row(1))
    figures = await scrape(s)
    assert figures("requests_total", deployment=name) == 1
    await nothing_is_left(s, a)


def test_what_no_name_can_hold_is_escaped_too() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from daskinfer.exposition import Collector

    name = 'a"b\\c\n<script>'

    class One(Collector):
        def figures(self) -> Any:
            yield self.gauge("ready", "Whether", ("deployment",), [((name,), 1)])

    registry = CollectorRegistry()
    collector = One()
    collector.namespace = "dask"
    registry.register(collector)
    figures = Scrape(generate_latest(registry).decode())
    assert [f.labels for f in figures.matching("ready")] == [{"deployment": name}]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_two_schedulers_in_a_process(c, s, a):
    model = await deploy(c, Probe(), "first", max_batch_size=1, warmup=ONE)
    await model.submit(row(1))
    async with (
        Scheduler(port=0, dashboard_address=":0", validate=True) as other,
        Worker(other.address),
        Client(other.address, asynchronous=True) as client,
    ):
        await deploy(client, Probe(), "second", max_batch_size=1, warmup=ONE)
        # The one that was started last.
        for server in (s, other):
            replicas = (await scrape(server)).by("deployment", "replicas")
            assert replicas == {"second": 1}
    assert (await scrape(s)).by("deployment", "replicas") == {"first": 1}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_error_leaves_dasks_own_figures_alone(c, s, a):
    await deploy(c, Probe(), max_batch_size=1, warmup=ONE)
    with captured_logger("distributed.inference.exposition") as log:
        engine(s).dispatcher.lines["m", "1"].figures.measures.wait = None
        text = (await ask(s, "/metrics")).body.decode()
    assert "dask_scheduler_workers" in text
    assert "Not all figures could be read" in log.getvalue()


def test_without_prometheus_client(monkeypatch: Any) -> None:
    from daskinfer.exposition import Collector

    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    collector = Collector()
    collector.add("a server")
    assert collector.sources == ["a server"]
    collector.discard("a server")
    assert collector.sources == []
