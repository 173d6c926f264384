"""register: Dask's own serializer keeps every tensor, in any container."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from dask.sizeof import sizeof
from distributed import Client
from distributed.protocol.serialize import deserialize_bytes, serialize_bytes
from distributed.utils_test import gen_cluster

from daskinfer.transport import register
from tests.payload.structures import Boxes, Frozen, ModelOutput, assert_same
from tests.transport.samples import PLAIN_DTYPES, exotic_tensors


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def travel(obj: Any) -> Any:
    return deserialize_bytes(serialize_bytes(obj, on_error="raise"))


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("count", [3, 0, 100_000])
def test_tensors_of_every_dtype(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.arange(count) % 7).to(dtype)
    arrived = travel(tensor)
    assert_same(arrived, tensor)
    arrived.zero_()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: {"y": x},
        lambda x: {"n": 1, "y": x},
        lambda x: (x, "text"),
        lambda x: ("text", [x]),
        lambda x: Boxes(x, [x]),
        lambda x: {"deep": Frozen({"er": (x,)})},
        lambda x: ModelOutput(logits=x),
    ],
)
def test_tensors_in_containers(wrap: Any) -> None:
    tree = wrap(torch.ones(2, 3).bfloat16())
    assert_same(travel(tree), tree)


@pytest.mark.parametrize("name", list(exotic_tensors()))
def test_odd_tensors(name: str) -> None:
    tensor = exotic_tensors()[name]
    arrived = travel(tensor)
    assert type(arrived) is type(tensor)
    assert arrived.layout == tensor.layout


def test_a_leaf_keeps_its_gradient() -> None:
    leaf = torch.ones(2, requires_grad=True)
    (leaf * 3).sum().backward()
    arrived = travel(leaf)
    assert arrived.requires_grad
    assert arrived.grad.tolist() == [3, 3]
    assert travel(leaf * 2).requires_grad


def test_a_tensor_counts_with_its_bytes() -> None:
    assert sizeof(torch.ones(1000)) == pytest.approx(4000, abs=200)
    assert sizeof({"y": torch.ones(1000).bfloat16()}) == pytest.approx(2000, abs=500)
    assert sizeof(torch.eye(1000).to_sparse()) == pytest.approx(20_000, abs=200)
    assert sizeof(torch.ones(1000, device="meta")) < 200
    assert sizeof(torch.nn.Parameter(torch.ones(1000))) == pytest.approx(4000, abs=200)


def test_parameters_and_modules() -> None:
    parameter = torch.nn.Parameter(torch.ones(2).bfloat16(), requires_grad=False)
    arrived = travel(parameter)
    assert type(arrived) is torch.nn.Parameter
    assert_same(arrived.data, parameter.data)
    assert not arrived.requires_grad
    module = torch.nn.Linear(2, 2).bfloat16()
    assert_same(travel(module).weight.data, module.weight.data)


def test_a_lambda_beside_a_tensor() -> None:
    class Local:
        def __init__(self) -> None:
            self.tensor = torch.ones(2).bfloat16()
            self.function = lambda: 3

    arrived = travel(Local())
    assert arrived.function() == 3
    assert_same(arrived.tensor, torch.ones(2).bfloat16())


def run(code: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()


CHECK = """
import torch
from distributed.protocol import deserialize, serialize
y = deserialize(*serialize({"y": torch.ones(2).bfloat16()}))["y"]
assert y.dtype == torch.bfloat16, y
"""


@pytest.mark.parametrize(
    "before",
    [
        "from daskinfer.transport import register; register()",
        "import torch; from daskinfer.transport import register; register()",
        "import torch, distributed.protocol as p; p.serialize(torch.ones(1));"
        "from daskinfer.transport import register; register()",
        "from daskinfer.transport import register; register(); register()",
    ],
)
def test_ours_wins_whichever_comes_first(before: str) -> None:
    run(f"{before}\n{CHECK}")


def test_registering_does_not_import_torch() -> None:
    run(
        "import sys; from daskinfer import payload; from daskinfer.transport import *\n"
        "import numpy as np\n"
        "register(); loads(dumps(np.ones(2))); unpack(*pack([np.ones(2)]))\n"
        "payload.split(payload.collate([((np.ones(2),), {})])[0][0], [1, 1])\n"
        "assert 'torch' not in sys.modules"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "uint16"])
def test_a_process_without_the_registration_reads_it_too(dtype: str) -> None:
    tensor = torch.ones(3).to(getattr(torch, dtype))
    sent = serialize_bytes({"y": tensor, "pair": (tensor,)}, on_error="raise")
    run(
        "import torch\n"
        "from distributed.protocol.serialize import deserialize_bytes\n"
        f"y = deserialize_bytes({sent!r})['y']\n"
        f"assert y.dtype == torch.{dtype}\n"
        "assert y.tolist() == [1, 1, 1]"
    )


def test_a_leaf_keeps_a_gradient_that_numpy_lacks() -> None:
    leaf = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    (leaf * 3).sum().backward()
    arrived = travel(leaf)
    assert arrived.dtype == arrived.grad.dtype == torch.bfloat16
    assert arrived.grad.tolist() == [3, 3]


@gen_cluster(client=True)
async def test_scatter_and_gather_over_a_cluster(c: Client, s: Any, *_: Any) -> None:
    trees = [
        torch.ones(2).bfloat16(),
        {"y": torch.ones(100_000).bfloat16(), "n": 1},
        Boxes(torch.ones(2).bfloat16(), "text"),
    ]
    futures = await c.scatter(trees)
    assert_same(await c.gather(futures), trees)
    doubled = c.map(lambda tree: (tree, tree), futures)
    assert_same(await c.gather(doubled), [(tree, tree) for tree in trees])
