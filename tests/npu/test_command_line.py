"""``dask infer worker`` and ``doctor`` on a host with two simulated NPUs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from distributed import Client

from tests.cli.processes import PATIENCE, infer, scheduler, workers

pytestmark = pytest.mark.process

SIMULATED = {"PYTHONPATH": str(Path(__file__).parent / "simulated")}


def test_a_worker_for_each_device_and_one_more(tmp_path, loop):
    with (
        scheduler(tmp_path) as (_, address),
        workers(tmp_path, address, "--cpu-workers", "1", env=SIMULATED) as running,
        Client(address, timeout=PATIENCE, loop=loop) as client,
    ):
        found = client.scheduler_info(n_workers=-1)["workers"].values()
        amounts = sorted(worker["resources"].get("NPU", 0) for worker in found)
        assert amounts == [0, 1, 1]

        ended = infer("doctor", "--scheduler", address, "--json", env=SIMULATED)
        assert ended.returncode == 0, ended.stderr
        nodes = json.loads(ended.stdout)["nodes"]
        seen = sorted(
            (
                about["visible"]["ASCEND_RT_VISIBLE_DEVICES"],
                about["devices"][0]["count"],
            )
            for node, about in nodes.items()
            if node.startswith("tcp://")
        )
        assert seen == [("", 0), ("0", 1), ("1", 1)]

        deploy = ("deploy", "tests.cli.models:add", "--device", "npu", "--name", "add")
        ended = infer(*deploy, "--scheduler", address, env=SIMULATED)
        assert ended.stdout == "add, version 1 (2 workers ready)\n", ended.stderr
        assert running.ends(signal.SIGTERM) == 0


def test_one_certain_device(tmp_path, loop):
    def visible() -> str | None:
        import os

        return os.environ.get("ASCEND_RT_VISIBLE_DEVICES")

    with (
        scheduler(tmp_path) as (_, address),
        workers(tmp_path, address, "--device", "npu:1", env=SIMULATED),
        Client(address, timeout=PATIENCE, loop=loop) as client,
    ):
        assert list(client.run(visible).values()) == ["1"]
        [told] = client.scheduler_info(n_workers=-1)["workers"].values()
        assert told["resources"] == {"NPU": 1}
