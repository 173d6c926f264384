"""The rule: a request's result is what the model would have answered to it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import BatchPolicy, OutputMismatch
from tests.cluster.helpers import Probe, linear
from tests.payload.structures import (
    Boxes,
    Frozen,
    ModelOutput,
    Pair,
    assert_same,
)


def rows(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).normal(size=(count, *shape))


def tensors(count: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(rows(count, *shape, seed=seed)).float()


async def together(
    client: Client,
    function: Callable[..., Any],
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]],
    **policy: Any,
) -> tuple[list[Any], Probe]:
    """Results of calls that meet in the queue, and the probe that answered them."""
    probe = Probe(function)
    model = await daskinfer.deploy(
        client,
        probe,
        name="model",
        # Nothing leaves before all are there, so they share what they can share.
        batching=BatchPolicy(
            min_batch_size=64, max_batch_size=64, max_wait="100ms", **policy
        ),
    )
    futures = [model.submit(*args, **kwargs) for args, kwargs in calls]
    return list(await asyncio.gather(*futures)), probe


IDENTITIES = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x + 1),
    "namedtuple": lambda x: Pair(x, x + 1),
    "dict": lambda x: {"first": x, "second": x + 1},
    "dataclass": lambda x: Boxes(x, x + 1),
    "frozen dataclass": lambda x: Frozen(x, x + 1),
    "mapping dataclass": lambda x: ModelOutput(x, x + 1),
    "nested": lambda x: {"a": (x, Boxes(x + 1, [x + 2, x + 3])), "b": Pair(x, None)},
}


@pytest.mark.parametrize("container", IDENTITIES)
@pytest.mark.parametrize("kind", [rows, tensors])
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_containers(
    client: Client, scheduler: Any, worker: Any, kind: Any, container: str
) -> None:
    function = IDENTITIES[container]
    inputs = [kind(n, 3) for n in (1, 5, 7)]
    answers, probe = await together(client, function, [((x,), {}) for x in inputs])
    for answer, x in zip(answers, inputs, strict=True):
        assert_same(answer, function(x))
    assert probe.rows == [13]


@pytest.mark.parametrize("container", IDENTITIES)
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_containers_as_inputs(
    client: Client, scheduler: Any, worker: Any, container: str
) -> None:
    inputs = [IDENTITIES[container](rows(n, 3)) for n in (1, 5, 7)]
    answers, probe = await together(client, lambda x: x, [((x,), {}) for x in inputs])
    for answer, x in zip(answers, inputs, strict=True):
        assert_same(answer, x)
    assert len(probe.calls) == 1


TENSOR_DTYPES = ["float16", "bfloat16", "float32", "float64", "bool", "int64", "uint8"]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES)
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_tensor_dtypes(
    client: Client, scheduler: Any, worker: Any, dtype: str
) -> None:
    inputs = [(tensors(n, 3) * 3).to(getattr(torch, dtype)) for n in (1, 2)]
    model = await daskinfer.deploy(client, torch.nn.Identity())
    for x in inputs:
        assert_same(await model.submit(x), x)
        assert_same(await client.submit(model, x), x)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "?", "i8", "u1", ">f4", "M8[s]"])
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_array_dtypes(
    client: Client, scheduler: Any, worker: Any, dtype: str
) -> None:
    inputs = [(rows(n, 3) * 3).astype("i8").astype(dtype) for n in (1, 2)]
    answers, probe = await together(client, lambda x: x, [((x,), {}) for x in inputs])
    for answer, x in zip(answers, inputs, strict=True):
        assert_same(answer, x)
    assert probe.rows == [3]


@gen_cluster(client=True)
async def test_module_given_arrays_answers_arrays(
    client: Client, scheduler: Any, *workers: Any
) -> None:
    net = linear()
    model = await daskinfer.deploy(client, net)
    x = rows(2, 4).astype("float32")
    answer = await model.submit(x)
    wanted = net(torch.from_numpy(x)).detach().numpy()
    assert type(answer) is np.ndarray and answer.dtype == np.float32
    np.testing.assert_allclose(answer, wanted, rtol=1e-6)


class Attention(torch.nn.Module):
    """Several tensors, and a keyword that changes what happens to them."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, *, scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        return {"scores": query * key * scale, "sum": (query + key).sum(-1)}


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_several_tensors_and_keywords(
    client: Client, scheduler: Any, worker: Any
) -> None:
    net = Attention()
    calls = [
        ((tensors(n, 3), tensors(n, 3, seed=1)), {"scale": scale})
        for n in (1, 2, 3)
        for scale in (1.0, 0.5)
    ]
    answers, probe = await together(client, net, calls)
    for answer, (args, kwargs) in zip(answers, calls, strict=True):
        assert_same(answer, net(*args, **kwargs))
    # One pass for each scale.
    assert sorted((len(a[0]), k["scale"]) for a, k in probe.calls) == [
        (6, 0.5),
        (6, 1.0),
    ]


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_tensors_as_keywords(client: Client, scheduler: Any, worker: Any) -> None:
    net = Attention()
    calls = [
        ((), {"query": tensors(n, 3), "key": tensors(n, 3, seed=1)}) for n in (1, 2)
    ]
    answers, probe = await together(client, net, calls)
    for answer, (args, kwargs) in zip(answers, calls, strict=True):
        assert_same(answer, net(*args, **kwargs))
    assert len(probe.calls) == 1


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_second_axis(client: Client, scheduler: Any, worker: Any) -> None:
    inputs = [rows(3, n, 2) for n in (1, 4)]
    answers, probe = await together(
        client, lambda x: x.sum(-1), [((x,), {}) for x in inputs], batch_dim=1
    )
    for answer, x in zip(answers, inputs, strict=True):
        assert_same(answer, x.sum(-1))
    assert [args[0].shape for args, _ in probe.calls] == [(3, 5, 2)]


@pytest.mark.parametrize("kind", [rows, tensors])
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_stacked_samples(
    client: Client, scheduler: Any, worker: Any, kind: Any
) -> None:
    samples = [kind(4, seed=i) for i in range(5)]
    answers, probe = await together(
        client,
        lambda x: {"double": x * 2, "sum": x.sum(-1)},
        [((x,), {}) for x in samples],
        batch_dim=None,
    )
    for answer, x in zip(answers, samples, strict=True):
        np.testing.assert_array_equal(answer["double"], x * 2)
        np.testing.assert_allclose(answer["sum"], x.sum(), rtol=1e-6)
        assert type(answer["double"]) is type(x)
    assert probe.rows == [5]


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_lists_of_strings(client: Client, scheduler: Any, worker: Any) -> None:
    texts = [["a text"], ["two", "more"], []]
    answers, probe = await together(
        client, lambda xs: [x.upper() for x in xs], [((x,), {}) for x in texts]
    )
    assert answers == [["A TEXT"], ["TWO", "MORE"], []]
    assert 3 in probe.rows


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_single_strings(client: Client, scheduler: Any, worker: Any) -> None:
    texts = ["a text", "two", "more"]
    answers, probe = await together(
        client,
        lambda xs: [x.upper() for x in xs],
        [((x,), {}) for x in texts],
        batch_dim=None,
    )
    assert answers == ["A TEXT", "TWO", "MORE"]
    assert probe.rows == [3]


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_dicts_of_lists(client: Client, scheduler: Any, worker: Any) -> None:
    requests = [
        {"text": ["a", "b"], "weight": [1, 2]},
        {"text": ["c"], "weight": [3]},
    ]

    def repeat(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        pairs = zip(batch["text"], batch["weight"], strict=True)
        return {"repeated": [text * times for text, times in pairs]}

    answers, probe = await together(client, repeat, [((x,), {}) for x in requests])
    assert answers == [{"repeated": ["a", "bb"]}, {"repeated": ["ccc"]}]
    assert len(probe.calls) == 1


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda x: np.array(x.sum()), r"output has shape \(\), so it has no axis 0"),
        (lambda x: {"loss": x[:-1]}, r"output\['loss'\] has shape .* 2 rows .* of 3"),
        (lambda x: (x, [0] * (len(x) + 1)), r"output\[1\] is a list of 4 entries"),
        (lambda x: "done", "output is str 'done', which has no batch axis"),
    ],
    ids=["scalar", "too few", "too many", "no array"],
)
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_outputs_without_the_batch_axis(
    client: Client, scheduler: Any, worker: Any, function: Any, said: str
) -> None:
    broken = Probe(lambda x: function(x) if x.any() else x)
    model = await daskinfer.deploy(client, broken)
    with pytest.raises(OutputMismatch, match=said):
        await model.submit(np.ones((3, 2)))
    # That batch has failed, and no other.
    zeros = np.zeros((3, 2))
    assert_same(await model.submit(zeros), zeros)
    status = await model.status()
    assert (status.successes, status.failures) == (1, 1)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_deployed_copy_is_in_eval_mode(
    client: Client, scheduler: Any, worker: Any
) -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
    )
    net(tensors(8, 4))  # statistics other than the initial ones
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert net.training
    model = await daskinfer.deploy(client, net)
    x = tensors(3, 4)
    answer = await model.submit(x)

    assert all(part.training for part in net.modules())
    after = net.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    torch.testing.assert_close(answer, net.eval()(x))


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_results_are_ordinary_tensors(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(client, linear())
    answer = await model.submit(tensors(2, 4))
    assert not answer.is_inference() and not answer.requires_grad
    answer += 1  # its own memory, not the network's buffer
