"""How simulated NPUs do, in Dask's worker metrics and for Prometheus."""

from __future__ import annotations

import logging

import pytest
import torch
from distributed.utils_test import captured_logger, gen_cluster

import daskinfer
from tests.cluster.helpers import until
from tests.cluster.http_helpers import ask_json, scrape

ONE_WORKER = [("127.0.0.1", 1)]
MIB = 1 << 20


def told(scheduler, worker, name="npu"):
    """What the scheduler was told with the latest heartbeat."""
    return scheduler.workers[worker.address].metrics.get(name)


def shown_of_workers(scheduler):
    """What Dask's table of workers shows, by column; the first row is their sum."""
    pytest.importorskip("bokeh")
    from bokeh.models import DataTable
    from distributed.dashboard.components.scheduler import WorkerTable

    page = WorkerTable(scheduler)
    page.update()
    tables = [part for part in page.root.children if isinstance(part, DataTable)]
    fields = [column.field for table in tables for column in table.columns]
    return {field: list(page.source.data[field]) for field in fields}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_heartbeats_tell_of_the_device(c, s, a):
    net = torch.nn.Linear(MIB, 1)  # 4 MiB
    model = await daskinfer.deploy(c, net, name="m", device="npu")
    await a.heartbeat()
    await until(lambda: (told(s, a) or {}).get("device") == "npu:0")
    npu = told(s, a)
    assert npu["name"] == torch.npu.get_device_name(0)
    assert npu["memory-total"] == 1 << 30
    assert npu["memory-used"] >= 4 * MIB
    assert npu["utilization"] == 0
    # For the table of workers.
    await a.heartbeat()
    assert told(s, a, "npu_memory") >= 4 * MIB
    assert told(s, a, "npu_utilization") == 0
    assert "gpu" not in s.workers[a.address].metrics
    shown = shown_of_workers(s)
    assert shown["npu_memory"] == 2 * [told(s, a, "npu_memory")]
    assert shown["npu_utilization"] == [0, 0]

    pytest.importorskip("prometheus_client")
    figures = await scrape(a)
    [used] = figures.matching("device_memory_used_bytes", worker=a.address)
    assert used.value >= 4 * MIB
    assert used.labels["device"] == "npu:0" and used.labels["name"] == npu["name"]
    assert figures("device_memory_total_bytes", device="npu:0") == 1 << 30
    assert len(list(figures.matching("device_utilization_ratio"))) == 1
    status = (await ask_json(s, "/inference/status.json"))[1]
    telemetry = status["workers"][a.address]["telemetry"]
    assert telemetry["npu"]["memory-total"] == 1 << 30

    # The device stays open, and free, when nothing is deployed.
    await model.undeploy()
    await a.heartbeat()
    assert told(s, a)["memory-used"] < 4 * MIB


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_no_device_is_opened_for_it(c, s, a):
    await daskinfer.deploy(c, torch.nn.Linear(2, 1), name="m", device="cpu")
    await a.heartbeat()
    npu = told(s, a)
    assert set(npu.values()) == {None}
    pytest.importorskip("prometheus_client")
    assert not [n for n in (await scrape(a)).families if "_device_" in n]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_the_driver_tells_is_a_share(c, s, a):
    await daskinfer.deploy(c, torch.nn.Linear(2, 1), name="m", device="npu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.npu, "utilization", lambda device: 25)
        await a.heartbeat()
    assert told(s, a)["utilization"] == 25
    pytest.importorskip("prometheus_client")
    assert (await scrape(a))("device_utilization_ratio") == 0.25


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_device_that_does_not_answer(c, s, a):
    await daskinfer.deploy(c, torch.nn.Linear(2, 1), name="m", device="npu")

    def broken(index):
        raise RuntimeError("error code is 507011")

    await a.heartbeat()
    assert told(s, a)["device"] == "npu:0"
    with (
        pytest.MonkeyPatch.context() as patch,
        captured_logger("distributed.inference.telemetry", logging.WARNING) as log,
    ):
        patch.setattr(torch.npu, "mem_get_info", broken)
        await a.heartbeat()
        await a.heartbeat()
        assert told(s, a)["device"] is None
        assert not a.plugins["daskinfer-runtime"].telemetry.devices()
    assert log.getvalue().count("507011") == 1
    await a.heartbeat()
    assert told(s, a)["device"] == "npu:0"
