"""A model deployed on two simulated NPUs, from the client's call to its answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from distributed import Client
from distributed.utils_test import poll_for
from torch import nn

import daskinfer
from daskinfer import BatchPolicy, LocalCluster

PATIENCE = 60


def digits_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


@dataclass
class Scores:
    logits: torch.Tensor
    best: torch.Tensor


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, object]:
        logits = self.layer(x) * scale
        scores = Scores(logits, logits.argmax(-1))
        return {"scores": scores, "half": logits.bfloat16(), "positive": logits > 0}


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def deploy(client):
    def deploy(*args, **options):
        options.setdefault("wait_timeout", PATIENCE)
        model = daskinfer.deploy(client, *args, **options)
        poll_for(lambda: len(ready_workers(model)) == 2, PATIENCE)
        return model

    yield deploy
    for model in daskinfer.deployments(client):
        model.undeploy()


def ready_workers(model) -> list[str]:
    workers = model.status().workers
    return [worker.address for worker in workers if worker.state == "ready"]


def on_workers(client: Client, function) -> Counter:
    """Sum what a function without arguments counts in each worker process."""
    return sum(map(Counter, client.run(function).values()), Counter())


def transfers() -> dict[str, int]:
    import torch_npu

    return torch_npu.simulator.counters(0)


def allocated() -> dict[str, int]:
    import gc

    import torch

    gc.collect()
    return {"bytes": torch.npu.memory_allocated(0)}


def test_answers_are_the_models_own_on_either_npu(client, deploy):
    net = digits_network()
    images = torch.randn(40, 1, 8, 8)
    model = deploy(net, name="digits")
    assert net.training
    with torch.inference_mode():
        expected = net.eval()(images)
    for worker in ready_workers(model):
        options = {"workers": [worker], "pure": False}
        futures = client.map(model, list(images.split(1)), **options)
        answers = client.gather(futures)
        assert {answer.device.type for answer in answers} == {"cpu"}
        torch.testing.assert_close(torch.cat(answers), expected)
        infos = [daskinfer.info(future) for future in futures]
        assert {(info.worker, info.device) for info in infos} == {(worker, "npu:0")}


def test_status_tells_the_device(deploy):
    model = deploy(nn.Linear(4, 3), name="linear")
    workers = model.status().workers
    assert {worker.device_class for worker in workers} == {"npu/Ascend910B1"}
    assert {worker.device for worker in workers} == {"npu:0"}


def test_a_batch_is_copied_once_there_and_once_back(client, deploy):
    model = deploy(nn.Linear(16, 4), name="wide", batching=BatchPolicy(32))
    before, passes_before = on_workers(client, transfers), model.status().passes
    rows = torch.randn(200, 16)
    daskinfer.gather(model.map(list(rows.split(1))))
    moved = on_workers(client, transfers) - before
    passes = model.status().passes - passes_before
    assert passes < 200
    assert (moved["to_device"], moved["to_host"]) == (passes, passes)
    assert moved["to_device_bytes"] == rows.nbytes


def test_structure_and_types_come_back_whole(deploy):
    net = Structured()
    model = deploy(net, name="structured", device="npu")
    x, scale = torch.randn(3, 4), torch.rand(3, 1)
    answer = model(x, scale=scale)
    with torch.inference_mode():
        expected = net.eval()(x, scale=scale)
    assert answer["half"].dtype == torch.bfloat16
    assert answer["positive"].dtype == torch.bool
    assert isinstance(answer["scores"], Scores)
    torch.testing.assert_close(answer["scores"].logits, expected["scores"].logits)
    assert torch.equal(answer["scores"].best, expected["scores"].best)


def test_arrays_in_arrays_out(deploy):
    net = nn.Linear(4, 3).eval()
    model = deploy(net, name="arrays")
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    answer = model(x)
    assert isinstance(answer, np.ndarray)
    np.testing.assert_allclose(
        answer, net(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6
    )


def test_only_allowed_sizes_reach_the_npu(deploy):
    policy = BatchPolicy(allowed_batch_sizes=[2, 8])
    net = nn.Linear(4, 3).eval()
    model = deploy(net, name="gears", batching=policy, warmup=torch.ones(1, 4))
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), net(x).detach())
    status = model.status()
    assert status.rows == 3
    assert status.padded_rows in (1, 5)  # as 2 + 2 or as 8 rows


def test_undeploying_frees_the_npu(client, deploy):
    before = on_workers(client, allocated)["bytes"]
    model = deploy(nn.Linear(512, 512), name="large")
    model(torch.ones(1, 512))
    assert on_workers(client, allocated)["bytes"] - before >= 2 * 4 * 512 * 512
    model.undeploy()
    assert on_workers(client, allocated)["bytes"] == before


def test_a_users_task_may_use_the_npu_too(client, deploy):
    model = deploy(nn.Linear(4, 3), name="shared")

    def double(x: torch.Tensor) -> torch.Tensor:
        return (x.to("npu") * 2).cpu()

    doubled = client.submit(double, torch.ones(2, 4), resources={"NPU": 1})
    answer = client.submit(model, doubled).result()
    assert answer.shape == (2, 3)


def test_a_kind_that_is_not_there_says_why(client):
    net = nn.Linear(4, 3)
    with pytest.raises(daskinfer.DeploymentFailed, match="built without CUDA"):
        daskinfer.deploy(client, net, name="gpu", device="cuda")
    assert daskinfer.deployments(client) == []


def test_what_does_not_fit_the_npu_is_answered_in_smaller_passes(client, deploy):
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat(1, 4096).sum(1, keepdim=True)

    def limit() -> None:
        import torch_npu

        torch_npu.simulator.set_limit(0, 64 << 20)

    def unlimit() -> None:
        import torch_npu

        torch_npu.simulator.set_limit(0, 1 << 30)

    model = deploy(Wide(), name="wide", batching=BatchPolicy(max_batch_size=64))
    client.run(limit)
    try:
        # 64 rows of 1,024 floats become 1 GiB on the device, 2 rows 32 MiB.
        answers = model(torch.arange(64.0)[:, None].expand(64, 1024).contiguous())
    finally:
        client.run(unlimit)
    assert answers.flatten().tolist() == [row * 1024 * 4096 for row in range(64)]
    assert model.status().failures == 0
    assert model.status().passes > 1
