"""LocalCluster with one worker process per simulated NPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed import Client
from torch import nn

from daskinfer.cluster import LocalCluster


def look() -> dict:
    import torch
    import torch_npu

    from daskinfer.device import open_device

    device = open_device()
    return {
        "ids": torch_npu.visible_ids,
        "device": str(device.torch_device),
        "class": device.device_class,
        "threads": torch.get_num_threads(),
    }


def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from daskinfer.device import open_device

    device = open_device("npu")
    with device.active(), torch.inference_mode():
        return device.to_host(net.to(device.torch_device)(device.put(x)))


@pytest.fixture
def client(cleanup):
    with (
        LocalCluster(dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_each_worker_process_has_one_npu(client):
    seen = sorted(client.run(look).values(), key=lambda found: found["ids"])
    assert [found["ids"] for found in seen] == [[0], [1]]
    assert {found["device"] for found in seen} == {"npu:0"}
    assert {found["class"] for found in seen} == {"npu/Ascend910B1"}
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    assert [worker["resources"] for worker in workers] == [{"NPU": 1.0}] * 2


def test_a_task_computes_on_a_workers_npu(client):
    net = nn.Linear(8, 4).eval()
    x = torch.randn(2, 8)
    futures = [
        client.submit(
            forward, net, x, workers=[worker], resources={"NPU": 1}, pure=False
        )
        for worker in client.scheduler_info(n_workers=-1)["workers"]
    ]
    for y in client.gather(futures):
        torch.testing.assert_close(y, net(x))


CLIENT = """
import torch
from distributed import Client

import daskinfer

if __name__ == "__main__":
    with daskinfer.LocalCluster(dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            net = torch.nn.Linear(4, 2)
            model = daskinfer.deploy(client, net, device="npu")
            x = torch.ones(3, 4)
            for future in (model.submit(x), client.submit(model, x)):
                torch.testing.assert_close(future.result(), net(x).detach())
                assert daskinfer.info(future).device.startswith("npu")
            # The scheduler of this cluster is in this process, too.
            assert torch.npu.device_count() == 2
            assert not torch.npu.is_initialized()
            print("no context here")
"""


def test_client_and_scheduler_open_no_npu(tmp_path):
    script = tmp_path / "client.py"
    script.write_text(CLIENT, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ["PYTHONPATH"]])
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.strip() == "no context here", ended.stderr


def test_cpu_workers_see_no_npu(cleanup):
    with LocalCluster(n_workers=1, device="cpu", dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            [found] = client.run(look).values()
    assert found["ids"] == []
    assert found["device"] == "cpu"
