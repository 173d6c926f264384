"""Inputs that fail, and those that shared a batch with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from distributed import wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import InferenceError
from tests.cluster.helpers import Probe, linear
from tests.cluster.scheduling_helpers import deploy, nothing_is_left

ONE_WORKER = [("127.0.0.1", 1)]
BATCH = 32
#: Nothing leaves before it is full.
FULL: Any = {"min_batch_size": BATCH, "max_batch_size": BATCH, "max_wait": "1m"}

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def inputs() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(BATCH, 4)).astype("float32")
    return np.split(rows, BATCH)


def ask_all(client: Any, way: str, model: Any, xs: list[Any]) -> list[Any]:
    return client.map(model, xs, pure=False) if way == "client" else model.map(xs)


async def in_one_batch(
    client: Any, way: str, probe: Probe, model: Any, xs: list[Any]
) -> list[Any]:
    """Ask, and see that the first pass is a full batch."""
    probe.calls.clear()
    futures = ask_all(client, way, model, xs)
    await wait(futures)
    assert probe.rows[0] == BATCH
    return futures


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_one_bad_input_in_a_full_batch(c, s, a, way):
    net = linear()

    def refuse_or_run(x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ArithmeticError("not a number")
        with torch.inference_mode():
            return net(x)

    xs = inputs()
    probe = Probe(lambda x: refuse_or_run(torch.as_tensor(x)))
    model = await deploy(c, probe, **FULL)
    without = [await f for f in await in_one_batch(c, way, probe, model, xs)]
    bad = list(xs)
    bad[13] = np.full((1, 4), np.nan, "float32")
    futures = await in_one_batch(c, way, probe, model, bad)
    for i, future in enumerate(futures):
        if i == 13:
            error = await future.exception()
            assert type(error) is ArithmeticError and error.args == ("not a number",)
            (note,) = error.__notes__
            assert "'m', version '1'" in note and a.address in note
        else:
            np.testing.assert_allclose(
                np.asarray(await future), np.asarray(without[i]), rtol=1e-6, atol=1e-6
            )
    status = await model.status()
    assert (status.failures, status.waiting, status.in_flight) == (1, 0, 0)
    assert status.workers[0].healthy
    del futures, future, error
    if way == "model":
        await nothing_is_left(s, a)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_two_inputs_that_fail_only_where_they_meet(c, s, a, way):
    def quarrel(x: np.ndarray) -> np.ndarray:
        if {3.0, 12.0} <= set(x[:, 0].tolist()):
            raise RuntimeError("3 meets 12")
        return x * 2

    xs = [np.full((1, 4), i, "float32") for i in range(BATCH)]
    probe = Probe(quarrel)
    model = await deploy(c, probe, **FULL)
    futures = await in_one_batch(c, way, probe, model, xs)
    # They did meet in it, and each has its answer.
    for i, y in enumerate(await daskinfer.gather(futures)):
        assert np.array_equal(y, 2 * xs[i])
    status = await model.status()
    assert (status.failures, status.waiting, status.in_flight) == (0, 0, 0)
    del futures
    await nothing_is_left(s, a)


class Unreadable:
    """A result that clients cannot unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ArithmeticError("cannot be read")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_one_result_that_the_client_cannot_read(c, s, a):
    def answer(x: np.ndarray) -> list[Any]:
        return [Unreadable() if value == 1 else float(value) for value in x[:, 0]]

    probe = Probe(answer)
    model = await deploy(c, probe, min_batch_size=4, max_batch_size=4, max_wait="1m")
    futures = model.map([np.full((1, 1), float(i)) for i in range(4)])
    await wait(futures)
    for i in (0, 2, 3):
        assert await futures[i] == [float(i)]
    with pytest.raises(ArithmeticError, match="cannot be read"):
        await futures[1]


class Speechless(RuntimeError):
    """An exception whose own code fails."""

    def __str__(self) -> str:
        raise LookupError("no words")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_one_exception_that_cannot_be_put_into_words(c, s, a):
    def refuse_one(x: np.ndarray) -> np.ndarray:
        if (x == 1).any():
            raise Speechless
        return x * 2

    model = await deploy(
        c, Probe(refuse_one), min_batch_size=4, max_batch_size=4, max_wait="1m"
    )
    futures = model.map([np.full((1, 1), float(i)) for i in range(4)])
    for i in (0, 2, 3):
        assert (await futures[i]).item() == 2 * i
    with pytest.raises(InferenceError, match="Speechless, which cannot be carried"):
        await futures[1]
    del futures
    await nothing_is_left(s, a)
