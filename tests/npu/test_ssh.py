"""``dask ssh`` on two hosts, one of which has one simulated NPU and one has two."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import Client, Worker

import daskinfer
from tests.ssh.hosts import PATIENCE, Host, dask_ssh, hosts, wait_until_empty

pytestmark = pytest.mark.process

SIMULATED = str(Path(__file__).parent / "simulated")


@pytest.fixture
def two_hosts(tmp_path):
    one = {"PYTHONPATH": SIMULATED, "SIMULATED_NPUS": "1"}
    two = {"PYTHONPATH": SIMULATED, "SIMULATED_NPUS": "2"}
    with hosts(tmp_path, one=one, two=two) as started:
        yield started


def visible(dask_worker: Worker) -> tuple[str, str | None, dict[str, float]]:
    ids = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return dask_worker.ip, ids, dict(dask_worker.state.total_resources)


def test_hosts_with_different_devices_from_one_hostfile(two_hosts, tmp_path, loop):
    net = torch.nn.Linear(8, 4).eval()
    inputs = np.random.default_rng(0).normal(size=(1000, 1, 8)).astype("float32")
    expected = net(torch.from_numpy(inputs)).detach().numpy()
    one, two = two_hosts
    with dask_ssh(two_hosts, tmp_path) as address:
        with Client(address, timeout=PATIENCE, loop=loop) as client:
            client.wait_for_workers(3, timeout=PATIENCE)
            assert seen_by_workers(client) == devices_of(one, "0") + devices_of(
                two, "0", "1"
            )
            model = daskinfer.deploy(client, net, name="net", device="npu")
            workers = model.status().workers
            assert [worker.device for worker in workers] == ["npu:0"] * 3

            futures = model.map(list(inputs[:500]))
            for process in two.workers():
                process.kill()
            futures += model.map(list(inputs[500:]))
            answers = np.stack(daskinfer.gather(futures))
            np.testing.assert_allclose(answers, expected, atol=1e-5)
            assert model.status().failures == 0

            # Their nannies start them again, each on its own device.
            client.wait_for_workers(3, timeout=PATIENCE)
            assert seen_by_workers(client) == devices_of(one, "0") + devices_of(
                two, "0", "1"
            )
    wait_until_empty(two_hosts)


def seen_by_workers(client: Client) -> list[tuple[str, str | None, dict[str, float]]]:
    return sorted(client.run(visible).values(), key=lambda seen: seen[:2])


def devices_of(host: Host, *ids: str) -> list[tuple[str, str, dict[str, float]]]:
    return [(host.address, number, {"NPU": 1.0}) for number in ids]
