"""A deployed network is the whole network, whatever it consists of."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client
from distributed.utils_test import gen_cluster

import daskinfer
from tests.cluster.helpers import linear

ROOT = Path(__file__).parents[2]
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Tied(torch.nn.Module):
    """Encoder and decoder are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = linear(4, 4)
        self.decode = linear(4, 4)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


class WithBuffers(torch.nn.Module):
    """A buffer that its state dict has, and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((4,), 3.0))
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift) * self.mask


class WithExtraState(torch.nn.Module):
    """State that is no tensor, and an attribute that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = {"a": 1.0}
        self.plain = torch.full((4,), 2.0)

    def get_extra_state(self) -> Any:
        return self.vocabulary

    def set_extra_state(self, state: Any) -> None:
        self.vocabulary = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.plain + self.vocabulary["b"]


def with_extra_state() -> torch.nn.Module:
    net = WithExtraState()
    net.vocabulary["b"] = 5.0
    return net


def quantised() -> torch.nn.Module:
    return torch.ao.quantization.quantize_dynamic(
        torch.nn.Sequential(linear(4, 4), torch.nn.ReLU()), {torch.nn.Linear}
    )


def half() -> torch.nn.Module:
    return torch.nn.Sequential(linear().to(torch.bfloat16))


def with_hook() -> torch.nn.Module:
    net = linear()
    net.register_forward_hook(lambda module, args, output: output + 1)
    return net


@pytest.mark.parametrize(
    "make", [Tied, WithBuffers, with_extra_state, quantised, half, with_hook]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao is deprecated
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_network(client: Client, scheduler: Any, worker: Any, make: Any) -> None:
    net = make()
    x = X.to(torch.bfloat16) if make is half else X
    wanted = copy.deepcopy(net).eval()(x)
    model = await daskinfer.deploy(client, net, name="net")
    answer = await model.submit(x)
    assert answer.dtype == wanted.dtype
    torch.testing.assert_close(answer, wanted)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_tied_weights_stay_tied(
    client: Client, scheduler: Any, worker: Any
) -> None:
    await daskinfer.deploy(client, Tied(), name="net")
    deployed: Any = worker.plugins["daskinfer-runtime"].loader.find("net", "1").function
    assert deployed.encode.weight is deployed.decode.weight


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_callers_network_is_another(
    client: Client, scheduler: Any, worker: Any
) -> None:
    net = linear()
    model = await daskinfer.deploy(client, net)
    before = await model.submit(X)
    with torch.no_grad():
        net.weight.zero_()
    torch.testing.assert_close(await model.submit(X), before)
    assert net.weight.requires_grad


class Pipeline:
    """A callable that holds a network and an array."""

    def __init__(self) -> None:
        self.net = linear().eval()
        self.shift = np.arange(4, dtype="float32")

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        scores = self.net(torch.from_numpy(x - self.shift))
        return {"scores": scores.numpy(), "best": scores.argmax(1).numpy()}


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_callable_object(client: Client, scheduler: Any, worker: Any) -> None:
    pipeline = Pipeline()
    model = await daskinfer.deploy(client, pipeline, name="pipeline")
    answer = await model.submit(X.numpy())
    with torch.no_grad():
        wanted = pipeline(X.numpy())
    assert set(answer) == set(wanted)
    for name in wanted:
        np.testing.assert_allclose(answer[name], wanted[name], rtol=1e-6)


SCRIPT = '''
"""All classes of this script live in __main__, which no worker can import."""
from dataclasses import dataclass

import torch
from distributed import Client
import daskinfer


@dataclass
class Answer:
    scores: torch.Tensor
    names: list


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, batch):
        return Answer(self.layer(batch["x"]), ["row"] * len(batch["x"]))


if __name__ == "__main__":
    with (
        daskinfer.LocalCluster(
            n_workers=1, device="cpu", dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        net = Net()
        model = daskinfer.deploy(client, net)
        x = {"x": torch.ones(2, 4)}
        wanted = net(x)
        for answer in (
            client.submit(model, x).result(),
            model.submit(x).result(),
            *daskinfer.gather(model.map([x])),
            client.submit(lambda model, x: model(x), model, x).result(),
        ):
            assert type(answer) is Answer, type(answer)
            assert answer.names == wanted.names
            torch.testing.assert_close(answer.scores, wanted.scores.detach())
        print("all equal in", client.run(lambda: __import__("os").getpid()))
'''


@pytest.mark.process
def test_classes_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "analysis.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "all equal in" in ended.stdout
