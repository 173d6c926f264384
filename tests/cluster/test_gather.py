"""Fetching results, and what can be known of them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client
from distributed.client import FutureCancelledError
from distributed.utils_test import gen_cluster, inc

import daskinfer
from tests.cluster.helpers import Probe, until
from tests.payload.structures import assert_same

X = np.arange(6.0).reshape(3, 2)


def halves(x: Any) -> Any:
    """Fails where its input is negative."""
    if (x < 0).any():
        raise ArithmeticError("negative")
    return x / 2


@gen_cluster(client=True)
async def test_nested_containers(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, halves)
    one, two = model.map([X, X + 2])
    # Ready ones, ones to come, ones of plain Dask, and what is no future.
    wanted = {"pair": (X / 2, X / 2 + 1), "list": [X / 2, [3, "text"]], "number": 2}
    nested = {"pair": (one, two), "list": [one, [3, "text"]], "number": 2}
    assert_same(await daskinfer.gather(nested), wanted)
    assert_same(await client.gather(nested), wanted)
    assert_same(await daskinfer.gather(one), X / 2)
    assert_same(await daskinfer.gather(f for f in (one, two)), list(wanted["pair"]))
    assert await daskinfer.gather([]) == []
    assert await daskinfer.gather({}) == {}


@pytest.mark.parametrize(
    "value",
    [
        X,
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor([[True, False]]),
        (X, {"names": ["a"] * 3}),
        np.zeros((1, 100_000)),
        [None] * 4,
    ],
    ids=["array", "bfloat16", "bool", "nested", "large", "none"],
)
@gen_cluster(client=True)
async def test_values(
    client: Client, scheduler: Any, a: Any, b: Any, value: Any
) -> None:
    model = await daskinfer.deploy(client, lambda x: x, name="identity")
    futures = [model.submit(value) for _ in range(3)]
    for packed in await daskinfer.gather(futures):
        assert_same(packed, value)
    for plain in await client.gather(futures):
        assert_same(plain, value)


@gen_cluster(client=True)
async def test_results_can_be_written_to_and_are_independent(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, halves)
    first, second = await daskinfer.gather(model.map([X, X]))
    first += 1
    np.testing.assert_array_equal(second, X / 2)


@gen_cluster(client=True)
async def test_futures_of_plain_dask_too(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, halves)
    plain = client.submit(inc, 1)
    text = client.submit(lambda: "text")
    answer, two, word = await daskinfer.gather([model.submit(X), plain, text])
    np.testing.assert_array_equal(answer, X / 2)
    assert (two, word) == (2, "text")


@gen_cluster(client=True)
async def test_errors_raise(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    probe = Probe(halves)
    model = await daskinfer.deploy(client, probe)
    failed = model.submit(-X - 1)
    with pytest.raises(ArithmeticError, match="negative"):
        await failed
    probe.close()
    # The first error is raised while others have not ended.
    with pytest.raises(ArithmeticError, match="negative"):
        await daskinfer.gather([model.submit(X), failed])
    probe.open()


@gen_cluster(client=True)
async def test_errors_skip(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, halves)
    good, bad, also_good = model.submit(X), model.submit(-X - 1), model.submit(X + 2)
    answers = await daskinfer.gather([good, bad, also_good], errors="skip")
    assert_same(answers, [X / 2, X / 2 + 1])
    assert_same(await client.gather([good, bad, also_good], errors="skip"), answers)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_result_that_cannot_be_sent(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(
        client, lambda xs: [threading.Lock() if x == "bad" else x for x in xs], name="f"
    )
    good, bad = model.submit(["good"]), model.submit(["bad"])
    for gather in (daskinfer.gather, client.gather):
        with pytest.raises(TypeError, match="Could not serialize object of type lock"):
            await gather([good, bad])
        assert await gather([good]) == [["good"]]


@gen_cluster(client=True)
async def test_cancelled(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    probe = Probe(is_open=False)
    model = await daskinfer.deploy(client, probe)
    running, cancelled = model.submit(X), model.submit(X)
    await probe.entered()
    waiting = asyncio.ensure_future(daskinfer.gather([running, cancelled]))
    await client.cancel([cancelled])
    probe.open()
    with pytest.raises(FutureCancelledError):
        await waiting
    assert_same(await running, X * 2)


@gen_cluster(client=True)
async def test_result_lost_with_its_worker(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, halves)
    futures = model.map([X + i for i in range(10)])
    await client.gather(futures)
    await a.close()
    answers = await daskinfer.gather(futures)
    assert_same(answers, [(X + i) / 2 for i in range(10)])


@gen_cluster(client=True)
async def test_arguments_are_checked(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, halves)
    future = model.submit(X)
    with pytest.raises(ValueError, match="errors must be 'raise' or 'skip'"):
        daskinfer.gather([future], errors="ignore")
    async with Client(scheduler.address, asynchronous=True) as other:
        with pytest.raises(ValueError, match="belong to 2 clients"):
            daskinfer.gather([future, other.submit(inc, 1)])
    assert_same(await future, X / 2)


@gen_cluster(client=True)
async def test_info(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    probe = Probe(is_open=False)
    model = await daskinfer.deploy(client, probe, version="2026-11")
    future = model.submit(X)
    await probe.entered()
    with pytest.raises(ValueError, match="is pending; wait for it first"):
        await daskinfer.info(future)
    probe.open()
    await future
    info = await daskinfer.info(future)
    assert (info.name, info.version) == (model.name, "2026-11")
    assert [w.address for w in (a, b) if future.key in w.data] == [info.worker]
    assert info.device == "cpu"
    assert info.batch_size == len(X)
    assert info.attempts == 1
    assert info.queue_seconds >= 0 and info.compute_seconds > 0

    by_graph = client.submit(model, X)
    await by_graph
    assert (await daskinfer.info(by_graph)).batch_size == len(X)


@gen_cluster(client=True)
async def test_info_of_other_futures(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, halves)
    plain = client.submit(inc, 1)
    await plain
    with pytest.raises(ValueError, match="was not made by a deployment"):
        await daskinfer.info(plain)
    failed = model.submit(-X - 1)
    await until(lambda: failed.status == "error")
    with pytest.raises(ValueError, match=r"no answer .* status is 'error'"):
        await daskinfer.info(failed)


@gen_cluster(client=True)
async def test_info_counts_attempts(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    failures = iter([True, True])

    def fails_twice(x: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("not yet")
        return x

    model = await daskinfer.deploy(client, Probe(fails_twice))
    future = model.options(retries=2).submit(X)
    assert_same(await future, X)
    assert (await daskinfer.info(future)).attempts == 3
