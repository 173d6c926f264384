"""``dask spec`` with the project's worker classes."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import poll_for

import daskinfer
from tests.cli.processes import PATIENCE, Server, scheduler

pytestmark = pytest.mark.process

SPEC = {
    "devices": {
        "cls": "daskinfer.DeviceWorkers",
        "opts": {"device": "cpu", "n_workers": 1, "name": "host", "dashboard": False},
    },
    "one": {
        "cls": "daskinfer.cluster.DeviceNanny",
        "opts": {"nthreads": 1, "name": "one", "resources": {"MEM": 2}},
    },
}


def test_workers_of_a_spec_serve_and_end(tmp_path, loop):
    with scheduler(tmp_path) as (_, address):
        spec = Server(
            tmp_path / "spec.log", "spec", address, "--spec", json.dumps(SPEC)
        )
        try:
            with Client(address, timeout=PATIENCE, loop=loop) as client:
                client.wait_for_workers(2, timeout=PATIENCE)
                found = client.scheduler_info(n_workers=-1)["workers"].values()
                names = {worker["name"]: worker["resources"] for worker in found}
                assert names == {"host": {}, "one": {"MEM": 2}}
                model = daskinfer.deploy(client, factory="tests.cli.models:add")
                ready = [worker.state for worker in model.status().workers]
                assert ready == ["ready"] * 2
                xs = [np.full((1, 3), i, "float32") for i in range(30)]
                for x, y in zip(xs, daskinfer.gather(model.map(xs)), strict=True):
                    assert np.array_equal(y, x + 1)
                assert spec.ends(signal.SIGTERM) == 0
                poll_for(lambda: not client.nthreads(), PATIENCE)
        finally:
            spec.stop()
