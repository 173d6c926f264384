"""``dask infer worker`` as a process: what it starts, and how it ends."""

from __future__ import annotations

import json
import signal
import sys

import pytest
from click.testing import CliRunner
from dask.system import CPU_COUNT
from distributed import Client
from distributed.cli.dask_worker import main as dask_worker
from distributed.security import Security

import daskinfer
from daskinfer.cli import worker as module
from daskinfer.cli.worker import worker
from daskinfer.device_workers import plan_workers
from tests.cli.processes import PATIENCE, Server, infer, scheduler, workers

pytestmark = pytest.mark.process


def told_of(client: Client) -> list[dict]:
    found = client.scheduler_info(n_workers=-1)["workers"].values()
    return sorted(found, key=lambda worker: str(worker["name"]))


@pytest.mark.smoke
def test_options_reach_the_workers(tmp_path, loop):
    file = tmp_path / "scheduler.json"
    preload = tmp_path / "noted.py"
    preload.write_text("def dask_setup(worker):\n    worker.noted = 'preloaded'\n")
    pid = tmp_path / "pid"
    options = (
        *("--scheduler-file", str(file), "--device", "cpu", "--nworkers", "2"),
        *("--name", "host", "--nthreads", "3", "--resources", "MEM=2,FPGA=1"),
        *("--memory-limit", "1GiB", "--host", "127.0.0.1", "--pid-file", str(pid)),
        *("--preload", str(preload), "--death-timeout", "60s"),
    )

    def noted(dask_worker) -> tuple[str, str]:
        return dask_worker.noted, dask_worker.local_directory

    with (
        scheduler(tmp_path, "--scheduler-file", str(file)),
        workers(tmp_path, *options) as running,
        Client(scheduler_file=str(file), timeout=PATIENCE, loop=loop) as client,
    ):
        assert pid.read_text() == str(running.process.pid)
        found = told_of(client)
        assert [worker["name"] for worker in found] == ["host-0", "host-1"]
        for worker in found:
            assert worker["nthreads"] == 3
            assert worker["resources"] == {"MEM": 2, "FPGA": 1}
            assert worker["memory_limit"] == 2**30
            assert worker["nanny"].startswith("tcp://127.0.0.1:")
        for mark, directory in client.run(noted).values():
            assert mark == "preloaded" and directory.startswith(str(tmp_path))
        assert running.ends(signal.SIGTERM) == 0
        assert not pid.exists()
        assert told_of(client) == []


def test_ctrl_c(tmp_path):
    with (
        scheduler(tmp_path) as (_, address),
        workers(tmp_path, address, "--cpu-workers", "1") as running,
    ):
        assert len(running.children()) >= 1
        assert running.ends(signal.SIGINT) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_they_end_when_the_scheduler_goes(tmp_path, signum):
    with (
        scheduler(tmp_path) as (server, address),
        workers(tmp_path, address, "--cpu-workers", "2") as running,
    ):
        server.process.send_signal(signum)
        assert running.ends() == 0


def test_a_worker_that_dies_is_started_again(tmp_path, loop):
    def pid() -> int:
        import os

        return os.getpid()

    with (
        scheduler(tmp_path) as (_, address),
        workers(tmp_path, address, "--cpu-workers", "1") as running,
        Client(address, timeout=PATIENCE, loop=loop) as client,
    ):
        [first] = client.run(pid).values()
        [process] = [child for child in running.children() if child.pid == first]
        process.kill()
        running.wait_for("Registered to:", 2)
        client.wait_for_workers(1, timeout=PATIENCE)
        [second] = client.run(pid).values()
        assert second != first
        assert running.ends(signal.SIGTERM) == 0


def test_over_tls(tmp_path, loop):
    pytest.importorskip("cryptography")
    security = Security.temporary()
    files = {"ca-file": security.tls_ca_file}
    files |= {"cert": security.tls_worker_cert, "key": security.tls_worker_key}
    options = []
    for name, content in files.items():
        file = tmp_path / f"{name}.pem"
        file.write_text(content)
        options += [f"--tls-{name}", str(file)]
    with (
        scheduler(tmp_path, *options) as (_, address),
        workers(tmp_path, address, "--cpu-workers", "1", *options) as running,
    ):
        model = ("deploy", "tests.cli.models:add", "--name", "add", "--json")
        ended = infer(*model, "--scheduler", address, *options)
        assert ended.returncode == 0, ended.stderr
        [found] = json.loads(ended.stdout)["workers"]
        assert found["address"].startswith("tls://")
        refused = infer("list", "--scheduler", address)
        assert refused.returncode == 2 and "asks for certificates" in refused.stderr
        assert running.ends(signal.SIGTERM) == 0


def test_no_scheduler_is_there(tmp_path):
    server = Server(
        tmp_path / "log",
        *("infer", "worker", "tcp://127.0.0.1:1", "--cpu-workers", "2"),
        *("--death-timeout", "1s", "--no-dashboard"),
    )
    assert server.process.wait(PATIENCE) == 1
    last = server.log.read_text().splitlines()[-1]
    assert last.startswith("Error: the workers could not be started: ")


def test_it_runs_as_a_module_as_dask_ssh_does():
    assert module.__name__ == "daskinfer.cli.worker"
    import subprocess

    ended = subprocess.run(
        [sys.executable, "-m", "daskinfer.cli.worker", "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0 and "--nanny-port" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "where is the scheduler?"),
        (["x", "--nworkers", "many"], "neither a number nor auto"),
        (["x", "--resources", "NPU"], "is not NAME=AMOUNT"),
        (["x", "--cpu-workers", "0"], "no worker is to be started"),
        (["x", "--device", "tpu"], "device='tpu' is unknown"),
        (["x", "--cpu-workers", "2", "--worker-port", "3000"], "too few for 2 workers"),
        (["x", "--no-such-option"], "no-such-option"),
        (["x", "--cpu-workers", "-1"], "-1"),
    ],
)
def test_wrong_use(arguments, message):
    ended = CliRunner().invoke(worker, arguments)
    assert ended.exit_code == 2 and message in ended.output


def test_a_device_that_is_not_there():
    ended = CliRunner().invoke(worker, ["x", "--device", "npu"])
    assert ended.exit_code == 1
    assert "device 'npu' cannot be used" in ended.output


def test_plans():
    assert plan_workers("npu", [0, 1, 2], 2, None) == [("npu", 0), ("npu", 1)]
    assert plan_workers("npu", [3], None, 0) == [("npu", 3)]
    assert plan_workers("npu", [0], 0, 1) == [("cpu", 0)]
    assert plan_workers("cpu", [], 1, 2) == [("cpu", 0)] * 3
    default = plan_workers("cpu", [], None, None)
    assert 1 <= len(default) <= CPU_COUNT and set(default) == {("cpu", 0)}
    with pytest.raises(ValueError, match="n_workers=2 is too many: there is 1 npu"):
        plan_workers("npu", [0], 2, None)
    with pytest.raises(ValueError, match="n_workers=-1 is negative"):
        plan_workers("npu", [0], -1, None)
    with pytest.raises(ValueError, match="no worker is to be started"):
        plan_workers("cpu", [], 0, None)


def test_it_is_part_of_the_package():
    assert daskinfer.DeviceWorkers.__name__ == "DeviceWorkers"


def test_it_has_the_options_of_dask_worker_but_for_those_of_one():
    theirs, ours = (
        {param.name for param in command.params} for command in (dask_worker, worker)
    )
    # Addresses of one worker; what Dask itself does not read any more.
    one = {"contact_address", "listen_address", "nanny"}
    assert theirs - ours == one | {"dashboard_prefix", "version"}
    assert {"device", "cpu_workers"} <= ours - theirs
