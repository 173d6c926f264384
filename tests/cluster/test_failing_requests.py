"""Failing requests leave nothing behind, on client and scheduler."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer.failure import copied
from tests.cluster.helpers import Probe
from tests.cluster.scheduling_helpers import ONE, deploy, nothing_is_left

ONE_WORKER = [("127.0.0.1", 1)]


def refuse(x: np.ndarray) -> np.ndarray:
    if (x < 0).any():
        raise ArithmeticError("negative")
    return x


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_future_whose_exception_was_raised_is_released(c, s, a):
    model = await deploy(c, Probe(refuse))
    future = model.submit(-ONE)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="negative"):
            await future
        with pytest.raises(ArithmeticError, match="negative"):
            await c.gather([future])
        with pytest.raises(ArithmeticError, match="negative"):
            await daskinfer.gather([future])
    assert future.status == "error"
    error = await future.exception()
    assert error.__notes__ and error.__traceback__ is not None
    del future, error
    await nothing_is_left(s, a)


@pytest.mark.parametrize(
    "count", [150, pytest.param(2_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
@gen_cluster(
    client=True,
    nthreads=ONE_WORKER,
    timeout=280,
    # What Dask keeps of the past is full after the first round.
    config={"distributed.admin.low-level-log-length": 100},
)
async def test_memory_stays_flat(c, s, a, count):
    s.transition_counter_max = math.inf  # a limit of Dask's own tests
    model = await deploy(c, refuse, warmup=ONE)
    held = []
    tracemalloc.start()
    try:
        for _ in range(4):
            futures = model.map([-ONE] * count)
            await wait(futures)
            assert isinstance(await futures[-1].exception(), ArithmeticError)
            with pytest.raises(ArithmeticError):
                await futures[0]
            del futures
            await nothing_is_left(s, a)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # A request that stays behind, on any side, is several KiB.
    assert held[-1] - held[1] < 2 * count * 1024
    assert np.array_equal(await model.submit(ONE), ONE)


class Inconstant(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_be_copied_is_raised_itself():
    error = Inconstant(1, 2)
    assert copied(error) is error
    assert copied(None) is None


def test_a_copy_keeps_what_belongs_to_an_exception():
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise ValueError("no") from cause
    except ValueError as error:
        again = copied(error)
        assert again is not error
        assert (type(again), again.args) == (ValueError, ("no",))
        assert again.__cause__ is error.__cause__
        assert again.__traceback__ is error.__traceback__
