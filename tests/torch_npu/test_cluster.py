"""One worker process per device, as the real torch_npu sees it."""

from __future__ import annotations

import os

import pytest
import torch
from distributed import Client
from torch import nn

from daskinfer.cluster import LocalCluster


def look() -> dict[str, object]:
    from daskinfer.device import detect, open_device

    return {
        "visible": os.environ["ASCEND_RT_VISIBLE_DEVICES"],
        "count": detect()["npu"].count,
        "device": str(open_device().torch_device),
    }


def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from daskinfer.device import open_device

    device = open_device("npu")
    with device.active(), torch.inference_mode():
        return device.to_host(net.to(device.torch_device)(device.put(x)))


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_each_worker_process_has_one_npu(client):
    seen = sorted(client.run(look).values(), key=lambda found: found["visible"])
    assert seen == [
        {"visible": "0", "count": 1, "device": "npu:0"},
        {"visible": "1", "count": 1, "device": "npu:0"},
    ]
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    assert [worker["resources"] for worker in workers] == [{"NPU": 1.0}] * 2


def test_a_task_computes_on_a_workers_npu(client):
    net = nn.Linear(8, 4).eval()
    x = torch.randn(2, 8)
    y = client.submit(forward, net, x, resources={"NPU": 1}).result()
    torch.testing.assert_close(y, net(x))
