"""A deployment on two worker processes with the real torch_npu."""

from __future__ import annotations

import pytest
import torch
from distributed import Client
from torch import nn

import daskinfer
from daskinfer import BatchPolicy, LocalCluster


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_a_deployed_network_answers_as_on_the_cpu(client):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(144, 10),
    )
    images = torch.randn(50, 1, 8, 8)
    model = daskinfer.deploy(
        client,
        net,
        name="digits",
        device="npu",
        batching=BatchPolicy(max_batch_size=16),
        warmup=images[:1],
        wait_timeout="2m",
    )
    with torch.inference_mode():
        expected = net.eval()(images)
    futures = client.map(model, list(images.split(1)))
    answers = client.gather(futures)
    torch.testing.assert_close(torch.cat(answers), expected)
    torch.testing.assert_close(model.predict(images), expected)
    assert {daskinfer.info(future).device for future in futures} == {"npu:0"}
    status = model.status()
    assert {worker.device_class for worker in status.workers} == {"npu/Ascend910B1"}
    assert status.failures == 0
    assert status.mean_batch_size > 1
    model.undeploy()


def test_types_come_back_whole(client):
    class Typed(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"half": x.bfloat16(), "positive": x > 0}

    model = daskinfer.deploy(client, Typed(), name="typed", wait_timeout="2m")
    x = torch.randn(3, 4)
    answer = model(x)
    assert torch.equal(answer["half"], x.bfloat16())
    assert torch.equal(answer["positive"], x > 0)
    model.undeploy()
