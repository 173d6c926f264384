"""What the scheduler's HTTP server tells programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from distributed import Worker, wait
from distributed.core import Status
from distributed.metrics import monotonic
from distributed.utils_test import gen_cluster

from daskinfer.caching import CachePolicy
from scheduler_plugins import dask_setup
from tests.cluster.helpers import Builder, Probe, build, until
from tests.cluster.http_helpers import ask, ask_json, is_ready
from tests.cluster.scheduling_helpers import ONE, deploy, engine

pytestmark = pytest.mark.smoke

ONE_WORKER = [("127.0.0.1", 1)]
READY, STATUS = "/inference/ready", "/inference/status.json"

#: What goes on by itself between two looks.
MOVING = ("throughput", "load")


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def still(told: Any) -> Any:
    """Plain data as JSON has it, without what goes on by itself."""
    if isinstance(told, dict):
        return {k: still(v) for k, v in told.items() if k not in MOVING}
    if isinstance(told, (list, tuple)):
        return [still(value) for value in told]
    return told


@gen_cluster(client=True, nthreads=[])
async def test_ready_follows_the_workers(c, s):
    await dask_setup(s)
    told = await is_ready(s, False)
    assert told["reason"].startswith("nothing is deployed")
    assert told == {"ready": False, "reason": told["reason"], "deployments": {}}
    await deploy(c, Probe(), wait=False)
    told = await is_ready(s, False)
    assert told["deployments"] == {"m": "the cluster has no worker"}
    async with Worker(s.address) as a:
        assert await is_ready(s, True) == {
            "ready": True,
            "reason": None,
            "deployments": {"m": None},
        }
        await a.close()
        await until(lambda: a.address not in s.workers)
        # As soon as Dask knows of it, not some time after.
        assert (await ask_json(s, READY))[0] == 503
    told = await is_ready(s, False)
    assert told["reason"] == "'m': the cluster has no worker"
    async with Worker(s.address):
        await until(lambda: len(engine(s).registry.can_answer("m")) == 1)
        assert (await ask_json(s, READY))[0] == 200
        await is_ready(s, True)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_ready_only_when_all_deployments_are(c, s, a):
    builder = Builder(is_open=False)
    await deploy(c, Probe())
    await is_ready(s, True)
    kwargs = {"builder": builder}
    factory = f"{build.__module__}:{build.__name__}"
    await deploy(c, None, "n", factory=factory, factory_kwargs=kwargs, wait=False)
    told = await is_ready(s, False)
    assert told["deployments"]["m"] is None
    assert told["deployments"]["n"] == f"no worker is ready: {a.address}: loading"
    builder.open()
    await is_ready(s, True)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_not_ready_while_every_worker_is_paused_or_unfit(c, s, a):
    model = await deploy(c, Probe())
    await model.submit(row(1))
    a.status = Status.paused
    told = await is_ready(s, False)
    assert told["deployments"] == {"m": "every ready worker is paused or closing"}
    a.status = Status.running
    await is_ready(s, True)
    health = engine(s).dispatcher.lines["m", "1"].health
    health.open(a.address, monotonic(), "it was seen to lie")
    told = await is_ready(s, False)
    assert "no worker is fit" in told["reason"] and "seen to lie" in told["reason"]
    # Half-open is enough: else no request came to close it.
    health.breakers[a.address]._until = monotonic()
    await is_ready(s, True)
    await model.submit(row(1))
    assert health.admits(a.address)


@pytest.mark.parametrize("prefix", ["/", "/dask/one"])
@pytest.mark.parametrize("dashboard", [True, False])
def test_prefix_and_schedulers_without_a_dashboard(prefix, dashboard):
    options = {"http_prefix": prefix, "dashboard": dashboard}

    @gen_cluster(client=True, nthreads=ONE_WORKER, scheduler_kwargs=options)
    async def look(c, s, a):
        await deploy(c, Probe())
        path = prefix.rstrip("/")
        for route in (READY, STATUS):
            assert (await ask(s, path + route)).code == 200
        if path:
            assert (await ask(s, READY)).code == 404

    look()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_status_tells_what_the_client_is_told(c, s, a, b):
    name = '"<script>&é'
    model = await deploy(c, Probe(), name, max_batch_size=4, cache=CachePolicy())
    await wait(model.map([row(i) for i in range(20)]))
    await model.submit(row(3))
    # The caches tell of themselves when they have stored all.
    await until(lambda: not engine(s).dispatcher.running.batches)
    status, told = await ask_json(s, STATUS)
    assert status == 200 and told["ready"] is True and told["reason"] is None
    assert list(told["deployments"]) == [name]
    known = asdict(await model.status())
    found = told["deployments"][name]
    del known["cache"], found["cache"]
    assert still(found) == still(known)
    assert found["requests"] == found["successes"] == 21
    assert told["queue"] == {
        "waiting": 0,
        "in_flight": 0,
        "batches": 0,
        "device_seconds": 0,
    }
    assert set(told["workers"]) == {a.address, b.address}
    worker = told["workers"][a.address]
    assert worker["devices"]["cpu"] and worker["status"] == "running"
    assert set(worker["reasons"]) == {"npu", "cuda"}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_status_tells_what_waits(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.close()
    futures = model.map([row(i) for i in range(9)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    queue = (await ask_json(s, STATUS))[1]["queue"]
    assert (queue["waiting"], queue["in_flight"], queue["batches"]) == (7, 2, 2)
    assert queue["device_seconds"] > 0
    probe.open()
    await wait(futures)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_routes_are_read_only(c, s, a):
    await deploy(c, Probe())
    before = still((await ask_json(s, STATUS))[1]["deployments"])
    for route in (READY, STATUS):
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            assert (await ask(s, route, method)).code == 405
        answer = await ask(s, route)
        assert answer.headers["Content-Type"].startswith("application/json")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
    answer = await ask(s, READY, "HEAD")
    assert (answer.code, answer.body) == (200, b"")
    assert still((await ask_json(s, STATUS))[1]["deployments"]) == before
