"""One big array through a model."""

from __future__ import annotations

from typing import Any
from unittest import mock

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Client
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import BatchPolicy
from tests.cluster.helpers import Probe, linear, until
from tests.payload.structures import assert_same

ROWS = 500
SMALL_PIECES = {"daskinfer.predict.chunk-bytes": "1 KiB"}


def array(rows: int = ROWS, columns: int = 4) -> np.ndarray:
    return np.arange(rows * columns, dtype="float32").reshape(rows, columns) / rows


@gen_cluster(client=True, config=SMALL_PIECES)
async def test_array(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    probe = Probe()
    model = await daskinfer.deploy(
        client, probe, batching=BatchPolicy(max_batch_size=16)
    )
    x = array()
    assert_same(await model.predict(x), x * 2)
    assert sum(probe.rows) == ROWS
    assert max(probe.rows) <= 16
    await until(lambda: not client.futures and not scheduler.tasks)


@gen_cluster(client=True, config=SMALL_PIECES)
async def test_tensor(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    net = linear()
    model = await daskinfer.deploy(client, net)
    x = torch.from_numpy(array())
    answer = await model.predict(x)
    torch.testing.assert_close(answer, net(x).detach())


@gen_cluster(client=True, config=SMALL_PIECES)
async def test_structured_output_and_keywords(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(
        client, lambda x, scale: {"y": x * scale, "names": ["row"] * len(x)}, name="f"
    )
    x = array()
    answer = await model.predict(x, scale=3)
    assert_same(answer, {"y": x * 3, "names": ["row"] * ROWS})


@gen_cluster(client=True, config=SMALL_PIECES)
async def test_second_axis(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(
        client, lambda x: x.sum(-1), name="f", batching=BatchPolicy(batch_dim=1)
    )
    x = array().reshape(2, 100, 10)
    assert_same(await model.predict(x), x.sum(-1))


@gen_cluster(client=True)
async def test_stacked_samples(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(
        client, Probe(), batching=BatchPolicy(batch_dim=None)
    )
    x = array()
    assert_same(await model.predict(x), x * 2)


@gen_cluster(client=True)
async def test_no_rows(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, Probe())
    assert_same(await model.predict(array(0)), array(0))


@gen_cluster(client=True)
async def test_no_samples(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(
        client, Probe(), batching=BatchPolicy(batch_dim=None)
    )
    with pytest.raises(ValueError, match=r"stacks single samples .* there is none"):
        await model.predict(array(0))


@gen_cluster(client=True)
async def test_few_rows(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, Probe())
    assert_same(await model.predict(array(1)), array(1) * 2)


@gen_cluster(client=True, config=SMALL_PIECES)
async def test_bounded_number_of_requests(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    most = most_unfinished = 0

    def count(x: Any) -> Any:
        nonlocal most, most_unfinished
        states = [ts.state for ts in scheduler.tasks.values()]
        most = max(most, len(states))
        most_unfinished = max(most_unfinished, len(states) - states.count("memory"))
        return x

    model = await daskinfer.deploy(
        client, Probe(count), batching=BatchPolicy(max_batch_size=1)
    )
    await model.predict(array())
    # Two for each worker, of five hundred rows; others are being released.
    assert 1 <= most_unfinished <= 4
    assert most <= 8


@gen_cluster(client=True, config=SMALL_PIECES)
async def test_error_cancels_the_rest(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    def fails(x: Any) -> Any:
        raise ArithmeticError("no")

    probe = Probe(fails)
    model = await daskinfer.deploy(client, probe)
    with pytest.raises(ArithmeticError, match="no"):
        await model.predict(array())
    assert sum(probe.rows) < ROWS
    await until(lambda: not client.futures and not scheduler.tasks)


@gen_cluster(client=True)
async def test_what_is_no_array(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, Probe())
    with pytest.raises(TypeError, match=r"not list; .* model\.map for many inputs"):
        model.predict([1, 2, 3])
    frame = type("DataFrame", (), {"shape": (2, 3)})()
    with pytest.raises(TypeError, match="not DataFrame; convert it to an array"):
        model.predict(frame)


@pytest.mark.parametrize("columns", [4, 2], ids=["one column chunk", "two"])
@gen_cluster(client=True)
async def test_dask_array(
    client: Client, scheduler: Any, a: Any, b: Any, columns: int
) -> None:
    net = linear()
    model = await daskinfer.deploy(client, net)
    x = array(40)
    lazy = await model.predict(da.from_array(x, chunks=(10, columns)))
    assert lazy.chunks == ((10,) * 4, (3,))
    assert lazy.dtype == np.float32
    answer = await client.compute(lazy)
    np.testing.assert_allclose(
        answer, net(torch.from_numpy(x)).detach().numpy(), rtol=1e-5
    )


@pytest.mark.parametrize(
    "function",
    [lambda x: x.argmax(1), lambda x: x[:, None] > 0, lambda x: x.astype("f2")],
    ids=["fewer axes", "more axes", "another dtype"],
)
@gen_cluster(client=True)
async def test_dask_array_of_another_shape(
    client: Client, scheduler: Any, a: Any, b: Any, function: Any
) -> None:
    model = await daskinfer.deploy(client, function, name="f")
    x = array(40)
    lazy = await model.predict(da.from_array(x, chunks=(10, 4)))
    wanted = function(x)
    assert lazy.shape == wanted.shape and lazy.dtype == wanted.dtype
    assert_same(await client.compute(lazy), wanted)


@gen_cluster(client=True)
async def test_dask_array_is_lazy(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe)
    x = da.from_array(array(40), chunks=(10, 4))
    lazy = await model.predict(x)
    assert sum(probe.rows) == 0
    total = await client.compute((lazy + 1).sum())
    np.testing.assert_allclose(total, (array(40) * 2 + 1).sum(), rtol=1e-5)
    assert sum(probe.rows) == 40


@gen_cluster(client=True)
async def test_dask_array_that_cannot_be(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    x = da.from_array(array(40), chunks=(10, 4))
    samples = await daskinfer.deploy(
        client, Probe(), name="samples", batching=BatchPolicy(batch_dim=None)
    )
    with pytest.raises(ValueError, match="deploy it with batch_dim=0"):
        await samples.predict(x)
    pairs = await daskinfer.deploy(client, lambda x: (x, x), name="pairs")
    with pytest.raises(TypeError, match="returns tuple, not one array"):
        await pairs.predict(x)


@pytest.mark.parametrize("batch_dim", [0, None])
@gen_cluster(client=True, config=SMALL_PIECES)
async def test_no_more_is_sent_than_may_wait(
    client: Client, scheduler: Any, a: Any, b: Any, batch_dim: int | None
) -> None:
    model = await daskinfer.deploy(
        client, Probe(), batching=BatchPolicy(batch_dim=batch_dim), max_queue=1
    )
    assert_same(await model.predict(array(50)), array(50) * 2)
    assert (await model.status()).failures == 0


@gen_cluster(client=True, config=SMALL_PIECES)
async def test_options_apply_to_every_piece(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, Probe(), warmup=array(1))
    bound = model.options(workers=[b.address], priority=1, timeout="30s")
    timeouts = set()
    arrived = scheduler.plugins["daskinfer"].lifecycle.arrived

    def note(request: Any) -> None:
        timeouts.add(request.timeout)
        arrived(request)

    x = array(100)
    with mock.patch.object(scheduler.plugins["daskinfer"].lifecycle, "arrived", note):
        answer = await bound.predict(x)
    assert_same(answer, x * 2)
    assert timeouts == {30.0}
    rows = {worker.address: worker.rows for worker in (await model.status()).workers}
    assert rows[a.address] == 0 and rows[b.address] >= 100
    with pytest.raises(ValueError, match="key= names one result"):
        model.options(key="k").predict(x)
    with pytest.raises(ValueError, match="workers, timeout would not reach"):
        model.options(workers=[b.address], timeout=1).predict(da.from_array(x))
