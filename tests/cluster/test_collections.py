"""Deployed models in Dask's collections."""

from __future__ import annotations

from asyncio import to_thread
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import gen_cluster

import daskinfer
from tests.cluster.helpers import Probe, linear

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")


def reference() -> Any:
    import torch

    return linear()(torch.from_numpy(X)).detach().numpy()


async def persisted(client: Client) -> da.Array:
    return client.persist(da.from_array(X, chunks=(5, 4)))


async def lazy(client: Client) -> da.Array:
    return da.from_array(X, chunks=(5, 4))


async def computed(client: Client) -> da.Array:
    return da.from_array(X - 1, chunks=(5, 4)) + 1


@pytest.mark.parametrize("source", [persisted, lazy, computed])
@gen_cluster(client=True)
async def test_map_blocks(
    client: Client, scheduler: Any, a: Any, b: Any, source: Any
) -> None:
    model = await daskinfer.deploy(client, linear())
    blocks = await source(client)
    mapped = da.map_blocks(
        model, blocks, chunks=(5, 3), meta=np.empty((0, 0), "float32")
    )
    answer = await client.compute(mapped)
    np.testing.assert_allclose(answer, reference(), atol=1e-6)


@pytest.mark.parametrize("known_by", ["warmup", "use"])
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_map_blocks_infers_meta(
    client: Client, scheduler: Any, worker: Any, known_by: str
) -> None:
    example = X[:1] if known_by == "warmup" else None
    model = await daskinfer.deploy(client, linear(), warmup=example)
    if known_by == "use":
        await model.submit(X)
    blocks = da.from_array(X, chunks=(5, 4))
    # Dask calls the model with arrays whose every axis is empty. That blocks, as
    # in a script, so it happens in a thread.
    mapped = await to_thread(
        da.map_blocks, model, blocks, chunks=(5, 3), dtype="float32"
    )
    assert type(mapped._meta) is np.ndarray
    assert mapped._meta.shape == (0, 0) and mapped.dtype == np.float32
    np.testing.assert_allclose(await client.compute(mapped), reference(), atol=1e-6)
    assert (await model.status()).failures == 0


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_map_blocks_infers_dtype(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(client, lambda x: x > 0, name="positive")
    blocks = da.from_array(X, chunks=(5, 4))
    mapped = await to_thread(da.map_blocks, model, blocks)
    assert mapped.dtype == bool
    np.testing.assert_array_equal(await client.compute(mapped), X > 0)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_map_blocks_with_an_asynchronous_client(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(client, linear(), warmup=X[:1])
    blocks = da.from_array(X, chunks=(5, 4))
    mapped = da.map_blocks(model, blocks, chunks=(5, 3), dtype="float32")
    assert type(mapped._meta) is np.ndarray and mapped.dtype == np.float32
    np.testing.assert_allclose(await client.compute(mapped), reference(), atol=1e-6)


@gen_cluster(client=True)
async def test_map_blocks_within_a_pipeline(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    probe = Probe(lambda x: x * 2)
    model = await daskinfer.deploy(client, probe)
    x = da.from_array(X, chunks=(5, 4))
    doubled = (x + 1).map_blocks(model, dtype=x.dtype, meta=x._meta)
    answer = await client.compute((doubled - 2).sum())
    np.testing.assert_allclose(answer, (X * 2).sum(), rtol=1e-5)
    assert sum(probe.rows) == len(X)


@pytest.mark.parametrize("batch", [False, True], ids=["map", "map_partitions"])
@gen_cluster(client=True)
async def test_bag(client: Client, scheduler: Any, a: Any, b: Any, batch: bool) -> None:
    probe = Probe(lambda texts: [text.upper() for text in texts])
    model = await daskinfer.deploy(
        client,
        probe,
        batching=daskinfer.BatchPolicy(batch_dim=0 if batch else None),
    )
    bag = db.from_sequence(["a", "b", "c", "d", "e"], npartitions=2)
    lazy = bag.map_partitions(model) if batch else bag.map(model)
    assert await client.compute(lazy) == ["A", "B", "C", "D", "E"]
    assert sum(probe.rows) == 5


@gen_cluster(client=True)
async def test_dataframe_partitions(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")

    model = await daskinfer.deploy(client, lambda x: x.sum(axis=1), name="sum")
    frame = pd.DataFrame(X, columns=list("abcd"))
    values = dd.from_pandas(frame, npartitions=3).to_dask_array(lengths=[7, 7, 6])
    sums = values.map_blocks(model, dtype="float32", drop_axis=1)
    np.testing.assert_allclose(await client.compute(sums), X.sum(axis=1), rtol=1e-5)


@gen_cluster(client=True)
async def test_delayed_graph(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, lambda x: x * 2, name="double")
    load = dask.delayed(lambda i: np.full((1, 2), i), pure=True)
    answers = [dask.delayed(model)(load(i)) for i in range(6)]
    total = dask.delayed(sum)(answers)
    assert (await client.compute(total) == 30).all()
    assert (await model.status()).successes == 6


@gen_cluster(client=True)
async def test_equal_calls_of_a_pinned_version_are_one_task(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    probe = Probe()
    await daskinfer.deploy(client, probe, name="double")
    model = await daskinfer.get(client, "double", version="1")
    first, second = client.submit(model, X), client.submit(model, X)
    assert first.key == second.key
    np.testing.assert_array_equal(await second, X * 2)
    assert len(probe.calls) == 1


def frame() -> Any:
    import dask.dataframe as dd
    import pandas as pd

    return dd.from_pandas(pd.DataFrame({"x": [1.0, 2.0]}), npartitions=1)


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: da.ones((4, 4)), r"model\.predict\(x\) or x\.map_blocks\(model"),
        (lambda: db.from_sequence([1, 2]), r"x\.map_partitions\(model\)"),
        (frame, r"x\.map_partitions\(model\)"),
        (lambda: dask.delayed(X), r"dask\.delayed\(model\)\(x\)"),
    ],
    ids=["array", "bag", "frame", "delayed"],
)
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_lazy_input_is_refused_with_what_to_do_instead(
    client: Client, scheduler: Any, worker: Any, make: Any, instead: str
) -> None:
    model = await daskinfer.deploy(client, linear())
    lazy = make()
    for call in (
        lambda: model(lazy),
        lambda: model.submit(lazy),
        lambda: model.submit([X, {"x": lazy}]),
        lambda: model.submit(X, mask=lazy),
        lambda: model.map([X, lazy]),
    ):
        with pytest.raises(TypeError, match=instead):
            call()
    # Futures are welcome, also many at once.
    futures = await client.scatter([X[:3], X[3:]])
    total = await daskinfer.deploy(client, lambda parts: np.concatenate(parts) * 2)
    np.testing.assert_allclose(await total.submit(futures), X * 2)
