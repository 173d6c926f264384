"""Deployments that the scheduler's configuration names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
import yaml
from distributed import Client, Scheduler, Worker
from distributed.utils_test import captured_logger, gen_cluster, poll_for

import daskinfer
from scheduler_plugins import dask_setup
from tests.cluster.helpers import SCHEME, until
from tests.cluster.http_helpers import is_ready
from tests.cluster.scheduling_helpers import engine

ONE_WORKER = [("127.0.0.1", 1)]
LINEAR = {
    "factory": "torch.nn:Linear",
    "factory-kwargs": {"in_features": 4, "out_features": 3},
}


async def set_up(scheduler: Scheduler, entries: Any) -> None:
    """Start the plugin as a preload does, with a configuration."""
    with dask.config.set({"daskinfer.deployments": entries}):
        await dask_setup(scheduler)


async def settled(scheduler: Scheduler) -> dict[str, str]:
    """Wait until every entry was tried; return what is wrong with them."""
    problems = engine(scheduler).configured.problems
    await until(lambda: "it is about to be deployed" not in problems.values())
    return problems


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_named_is_deployed(c, s, a):
    entry = {**LINEAR, "version": "7", "batching": {"max-batch-size": 4}, "cache": True}
    await set_up(s, {"scorer": entry, "other": LINEAR})
    await is_ready(s, True)
    assert await settled(s) == {}
    model = await daskinfer.get(c, "scorer")
    assert (await model.submit(np.ones((2, 4), "f4"))).shape == (2, 3)
    status = await model.status()
    assert status.active_version == "7" and status.cache is not None
    assert model.cached
    # It is a deployment like any other.
    await model.undeploy()
    told = await is_ready(s, True)
    assert told["deployments"] == {"other": None}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_file_on_the_schedulers_host(c, s, a):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "wide.pt2"
        net = torch.nn.Linear(64, 1024)  # more than travels with the rest
        rows = {0: torch.export.Dim("rows")}
        program = torch.export.export(net, (torch.ones(2, 64),), dynamic_shapes=(rows,))
        torch.export.save(program, file)
        await set_up(s, {"wide": {"path": str(file)}})
        await is_ready(s, True)
    model = await daskinfer.get(c, "wide")
    x = np.ones((1, 64), "f4")
    expected = net(torch.from_numpy(x)).detach().numpy()
    assert np.allclose(await model.submit(x), expected, atol=1e-5)
    # Nothing holds the weights but the deployment.
    assert len(engine(s).distribution.entries) == 1
    await model.undeploy()
    assert engine(s).distribution.entries == {}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_entries_that_are_wrong_keep_no_others_from_being_deployed(c, s, a):
    entries = {
        "misspelt": {**LINEAR, "batchin": {}},
        "missing": {"path": "/nowhere/net.pt2"},
        "misplaced": {**LINEAR, "placement": "no.such.Class"},
        "fine": LINEAR,
        "unloadable": {"factory": "no_such_module:build"},
    }
    with captured_logger("distributed.inference.configured") as log:
        await set_up(s, entries)
        problems = await settled(s)
    assert set(problems) == {"misspelt", "missing", "misplaced"}
    assert "no field batchin" in problems["misspelt"]
    assert "no model file at /nowhere/net.pt2" in problems["missing"]
    assert "no.such.Class" in problems["misplaced"]
    for name in problems:
        assert f"daskinfer.deployments.{name} is not deployed" in log.getvalue()
    await until(lambda: engine(s).registry.can_answer("fine"))
    await until(lambda: engine(s).registry.version("unloadable").settled())
    told = (await is_ready(s, False))["deployments"]
    assert told["fine"] is None
    assert "no field batchin" in told["misspelt"]
    assert "No module named 'no_such_module'" in told["unloadable"]
    # Who deploys it by hand has no problem any more.
    model = await daskinfer.deploy(c, torch.nn.Identity(), name="missing")
    assert np.array_equal(await model.submit(np.ones((1, 1))), np.ones((1, 1)))
    assert engine(s).readiness.problems()["missing"] is None


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_no_mapping(c, s, a):
    await set_up(s, ["scorer"])
    told = await is_ready(s, False)
    assert "must map names to deployments" in told["reason"]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_who_was_faster_stays(c, s, a):
    model = await daskinfer.deploy(c, torch.nn.Identity(), name="m")
    with dask.config.set({"daskinfer.deployments": {"m": LINEAR}}):
        engine(s).configured.start()
    assert await settled(s) == {}
    assert (await model.submit(np.ones((1, 2)))).shape == (1, 2)


@gen_cluster(client=True, nthreads=[])
async def test_without_workers(c, s):
    await set_up(s, {"scorer": LINEAR})
    assert await settled(s) == {}
    told = await is_ready(s, False)
    assert told["deployments"] == {"scorer": "the cluster has no worker"}
    async with Worker(s.address):
        await is_ready(s, True)


# In processes, as they are started in a terminal

Start = Callable[..., "subprocess.Popen[bytes]"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    settings = tmp_path / "config"
    settings.mkdir()
    content = {"daskinfer": {"deployments": {"scorer": LINEAR}}}
    (settings / "deployments.yaml").write_text(yaml.safe_dump(content))
    environment = {**os.environ, "DASK_CONFIG": str(settings)}
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: str, *args: str) -> subprocess.Popen[bytes]:
        module = f"distributed.cli.dask_{command}"
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args], env=environment, cwd=tmp_path
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def readiness(port: int) -> tuple[int, str]:
    """The status of the route and the reason, or 0 while nobody answers."""
    url = f"http://127.0.0.1:{port}/dask/inference/ready"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        body = error.read()
        # Before the plugin starts there is no such route.
        reason = json.loads(body)["reason"] if error.code == 503 else ""
        return error.code, reason
    except OSError:
        return 0, ""


@pytest.mark.process
def test_a_scheduler_that_is_restarted(start: Start, loop: Any) -> None:
    port, http_port = free_port(), free_port()
    address = f"{SCHEME}127.0.0.1:{port}"

    def start_scheduler() -> subprocess.Popen[bytes]:
        return start(
            "scheduler",
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dashboard-address", f"127.0.0.1:{http_port}", "--no-show"),
            *("--dashboard-prefix", "dask", "--preload", "scheduler_plugins"),
        )

    def start_worker() -> subprocess.Popen[bytes]:
        return start("worker", address, "--no-nanny", "--nthreads", "1")

    scheduler, worker = start_scheduler(), start_worker()
    poll_for(lambda: readiness(http_port)[0] == 200, 60)
    scheduler.kill()
    scheduler.wait()
    poll_for(lambda: readiness(http_port)[0] == 0, 60)
    worker.kill()
    scheduler = start_scheduler()
    no_worker = "'scorer': the cluster has no worker"
    poll_for(lambda: readiness(http_port) == (503, no_worker), 60)
    worker = start_worker()
    poll_for(lambda: readiness(http_port)[0] == 200, 60)
    with Client(address, loop=loop) as client:
        model = daskinfer.get(client, "scorer")
        assert model.submit(np.ones((2, 4), "f4")).result().shape == (2, 3)
    # The last worker dies, and another comes.
    worker.kill()
    poll_for(lambda: readiness(http_port) == (503, no_worker), 60)
    start_worker()
    poll_for(lambda: readiness(http_port)[0] == 200, 60)
