"""Every command but ``worker``, as a process on a cluster of processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time

import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client

import daskinfer
from daskinfer.cli import infer as group
from daskinfer.cli.command import Failed
from daskinfer.cli.connection import Connection
from tests.cli.processes import PATIENCE, Server, infer, scheduler, workers

pytestmark = pytest.mark.process

MODELS = "tests.cli.models"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    with (
        scheduler(folder) as (_, address),
        workers(folder, address, "--device", "cpu", "--nworkers", "2"),
    ):
        yield address


@pytest.fixture
def run(address):
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return infer(*arguments, "--scheduler", address)

    return command


def succeeded(ended: subprocess.CompletedProcess[str]) -> str:
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def failed(ended: subprocess.CompletedProcess[str]) -> str:
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


@pytest.mark.smoke
def test_the_life_of_a_deployment(run, address, tmp_path, loop):
    assert succeeded(run("list")).startswith("Nothing is deployed")
    assert json.loads(succeeded(run("list", "--json"))) == []

    np.save(tmp_path / "example.npy", np.zeros((2, 3), "float32"))
    told = run(
        *("deploy", f"{MODELS}:add", "--name", "add", "--factory-argument", "amount=2"),
        *("--batch", "max-batch-size=8", "--warmup", str(tmp_path / "example.npy")),
        *("--device", "cpu", "--max-queue", "1000", "--retry", "max-attempts=2"),
        *("--cache-tier", "host=1MiB", "--json"),
    )
    status = json.loads(succeeded(told))
    assert (status["name"], status["active_version"]) == ("add", "1")
    assert [worker["state"] for worker in status["workers"]] == ["ready"] * 2
    assert status["cache"] is not None

    again = failed(run("deploy", f"{MODELS}:add", "--name", "add"))
    assert "'add' is deployed already" in again and "dask infer update" in again

    told = run("update", "add", f"{MODELS}:add", "--version", "2")
    assert succeeded(told).startswith("add, version 2 (2 workers ready)")
    with Client(address, loop=loop) as client:
        model = daskinfer.get(client, "add")
        assert model(np.zeros((1, 3))).tolist() == [[1, 1, 1]]
        assert succeeded(run("rollback", "add")).startswith("add, version 1 ")
        future = model.submit(np.zeros((1, 3)))
        assert future.result().tolist() == [[2, 2, 2]]
        table = succeeded(run("story", "add", future.key))
        assert table.startswith(f"{future.key!r} of 'add', since ")
        assert "answered" in table.splitlines()[-1]
        told = json.loads(succeeded(run("story", "add", future.key, "--json")))
        assert (told["key"], told["state"]) == (future.key, "answered")
        assert "sent" in [entry["event"] for entry in told["entries"]]
        assert "knows of no request 'never'" in failed(run("story", "add", "never"))

    told = run("update", "add", f"{MODELS}:add", "--version", "3", "--manual")
    assert succeeded(told).startswith("add, version 1 ")
    assert succeeded(run("promote", "add")).startswith("add, version 3 ")
    assert "add" in failed(run("abort", "add"))

    line = succeeded(run("list")).splitlines()[1]
    assert line.split()[:5] == ["add", "3", "2", "of", "2"]
    [listed] = json.loads(succeeded(run("list", "--json")))
    assert listed["requests"] == listed["successes"] == 2

    assert succeeded(run("undeploy", "add")) == "add is undeployed\n"
    assert "no deployment is named 'add'" in failed(run("status", "add"))


def test_a_model_that_does_not_load(run):
    line = failed(run("deploy", f"{MODELS}:broken", "--name", "broken", "--json"))
    assert line == "Error: RuntimeError: these weights are no good"


def test_names_that_are_refused(run):
    for option in ("--name", "--version"):
        line = failed(run("deploy", f"{MODELS}:add", option, "../add"))
        assert line.endswith(f"{option[2:]} must not contain '/', got '../add'")
    assert json.loads(succeeded(run("list", "--json"))) == []


def test_status_again_and_again(run, address, tmp_path):
    succeeded(run("deploy", f"{MODELS}:add", "--name", "watched"))
    assert succeeded(run("status", "watched")).startswith("watched, version 1 ")
    watch = Server(
        tmp_path / "log",
        *("infer", "status", "watched", "--watch", "--interval", "0.1", "--json"),
        *("--scheduler", address),
    )
    watch.wait_for("\n", 3)
    assert watch.ends(signal.SIGINT) == 0
    lines = watch.log.read_text().splitlines()
    assert {json.loads(line)["name"] for line in lines} == {"watched"}
    succeeded(run("undeploy", "watched"))


def test_bench(run, tmp_path):
    succeeded(run("deploy", f"{MODELS}:add", "--name", "fast"))
    plot = tmp_path / "bench.png"
    small = ("--seconds", "0.1", "--batch-sizes", "1,4", "--concurrency", "1,2")
    told = run("bench", "fast", "--shape", "3", *small, "--json", "--plot", str(plot))
    cells = json.loads(succeeded(told))
    assert [(cell["concurrency"], cell["batch_size"]) for cell in cells] == [
        *((1, 1), (1, 4), (2, 1), (2, 4))
    ]
    for cell in cells:
        assert cell["requests"] >= cell["concurrency"]
        assert 0 < cell["p50"] <= cell["p95"] <= cell["p99"]
        assert cell["rows_per_second"] > 0
    assert cells[1]["rows_per_pass"] == 4
    assert plot.read_bytes().startswith(b"\x89PNG")

    example = tmp_path / "example.npy"
    np.save(example, np.zeros((2, 3), "float32"))
    table = succeeded(run("bench", "fast", "--example", str(example), *small))
    titles, *rows = table.splitlines()
    assert titles.split()[:3] == ["callers", "rows", "rows/s"]
    assert [row.split()[:2] for row in rows] == [
        *(["1", "1"], ["1", "4"], ["2", "1"], ["2", "4"])
    ]
    np.save(example, np.array(["no number"]))
    assert "UFuncTypeError" in failed(run("bench", "fast", "--example", str(example)))
    succeeded(run("undeploy", "fast"))


def test_doctor(run, address):
    told = succeeded(run("doctor"))
    assert told.endswith("healthy\n") and "not healthy" not in told
    assert told.count("tcp://127.0.0.1:") >= 2 and "no npu on " in told
    found = json.loads(succeeded(run("doctor", "--json")))
    assert found["healthy"]
    assert len(found["nodes"]) == 4
    for node, about in found["nodes"].items():
        assert about["packages"]["daskinfer"] == daskinfer.__version__
        if node.startswith("tcp://"):
            kinds = {device["kind"]: device for device in about["devices"]}
            assert kinds["npu"]["count"] == 0 and kinds["npu"]["reason"]
            assert kinds["cpu"]["count"] == 1


def test_doctor_when_a_worker_does_not_answer(run, address, loop):
    with Client(address, loop=loop) as client:
        pids = client.run(os.getpid)
    silent, pid = next(iter(pids.items()))
    os.kill(pid, signal.SIGSTOP)
    try:
        ended = run("doctor", "--patience", "3")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (ended.returncode, ended.stderr) == (1, "")
    text = "told nothing of itself: no answer within 3 s"
    assert f"\nfault: {silent}: {text}\n" in ended.stdout


def test_doctor_of_a_cluster_without_workers(tmp_path):
    with scheduler(tmp_path) as (_, address):
        ended = infer("doctor", "--scheduler", address)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "\nfault: cluster: there is no worker" in ended.stdout
    assert ended.stdout.endswith("\nnot healthy\n")


def test_doctor_of_this_host():
    ended = infer("doctor", "--json")
    found = json.loads(succeeded(ended))
    assert list(found["nodes"]) == ["this host"]
    assert found["nodes"]["this host"]["devices"]


def test_no_scheduler_is_there():
    began = time.monotonic()
    ended = infer("list", "--scheduler", "tcp://127.0.0.1:1", "--timeout", "1s")
    assert "no scheduler was reached" in failed(ended)
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list"], "where is the scheduler?"),
        (["deploy", "nothing-like-it", "--scheduler", "x"], "is no file, and no "),
        (["deploy", "m:f", "--batch", "speed=1", "--scheduler", "x"], "no 'speed'"),
        (["deploy", "m:f", "--batch", "8", "--scheduler", "x"], "is not KEY=VALUE"),
        (["bench", "m", "--scheduler", "x"], "either --example or --shape"),
        (["bench", "m", "--batch-sizes", "0", "--shape", "1"], "no list of numbers"),
        (["list", "--scheduler", "nonsense"], "is no scheduler's address"),
        (["list", "--scheduler", "x", "--timeout", "soon"], "'soon' is no time"),
        (["list", "--scheduler-file", __file__], "tells no scheduler's address"),
        (["status"], "Missing argument"),
        (["no-such-command"], "No such command"),
    ],
)
def test_wrong_use(arguments, message):
    ended = CliRunner().invoke(group, arguments)
    assert ended.exit_code == 2 and message in ended.output


def test_a_command_leaves_the_log_of_its_process_as_it_was() -> None:
    """Commands are also called from programs, which go on."""
    logger = logging.getLogger("distributed")
    before = logger.level
    ended = CliRunner().invoke(group, ["list", "--scheduler", "nonsense"])
    assert ended.exit_code == 2 and logger.level == before
    with pytest.raises(Failed), Connection("tcp://127.0.0.1:1", timeout=0.1).client():
        pass
    assert logger.level == before
