"""One model on another's answers, on the same workers, while those die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed import Nanny
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import Model
from tests.cluster.helpers import linear, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left

pytestmark = pytest.mark.process

THREE_WORKERS = [("127.0.0.1", 1)] * 3
COUNT = 60
DEATHS = 3


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def doubling() -> Callable[[Any], Any]:
    # Pickled by value: worker processes don't import the tests.
    def double(x: np.ndarray) -> np.ndarray:
        import time

        time.sleep(0.05)
        return x * 2

    return double


def calling(other: Model) -> Callable[[Any], Any]:
    def call(x: np.ndarray) -> np.ndarray:
        return other(x) + 1

    return call


async def kill_one_that_runs(
    scheduler: Any, nannies: tuple[Nanny, ...], name: str, answers: int
) -> None:
    """Kill a worker's process while a batch is on it; the nanny starts another.

    Once a deployment has given so many answers: fewer than it is asked for, so that
    there is more to do.
    """
    dispatcher = engine(scheduler).dispatcher
    batches, counts = dispatcher.running.batches, dispatcher.statistics[name]
    await until(
        lambda: (
            counts.successes >= answers
            and any(batch.requests for batch in batches.values())
        )
    )
    address = next(b.device.name for b in batches.values() if b.requests)
    (nanny,) = (n for n in nannies if n.worker_address == address)
    before = scheduler._workers_removed_total
    assert nanny.pid is not None
    os.kill(nanny.pid, signal.SIGKILL)
    await until(lambda: scheduler._workers_removed_total == before + 1)


async def whole(scheduler: Any, name: str, count: int) -> None:
    """Wait until so many workers serve a deployment."""
    await until(
        lambda: len(engine(scheduler).dispatcher.lines[name, "1"].devices) == count
    )


@gen_cluster(client=True, nthreads=THREE_WORKERS, Worker=Nanny, timeout=240)
async def test_a_model_that_calls_another(c, s, *nannies):
    inner = await deploy(c, doubling(), "inner", max_batch_size=8)
    outer = await deploy(c, calling(inner), "outer", max_batch_size=8)
    for death in range(DEATHS):
        await whole(s, "outer", len(nannies))
        futures = [
            *outer.map([row(i) for i in range(COUNT)]),
            *c.map(outer, [row(i) for i in range(COUNT)], pure=False),
        ]
        await kill_one_that_runs(s, nannies, "outer", 0)
        for i, future in enumerate(futures):
            assert np.array_equal(await future, row(2 * (i % COUNT) + 1)), death
    s.validate_state()
    for model in (inner, outer):
        status = await model.status()
        assert (status.waiting, status.in_flight, status.failures) == (0, 0, 0)
    del futures, future
    await nothing_is_left(s)


@pytest.mark.parametrize("way", ["client", "model"])
@gen_cluster(client=True, nthreads=THREE_WORKERS, Worker=Nanny, timeout=240)
async def test_one_after_the_other(c, s, *nannies, way):
    first = await deploy(c, doubling(), "first", max_batch_size=8)
    second = await deploy(c, doubling(), "second", max_batch_size=8)

    def chain(x: np.ndarray) -> Any:
        if way == "model":
            return second.submit(first.submit(x))
        return c.submit(second, c.submit(first, x, pure=False), pure=False)

    for death in range(DEATHS):
        await whole(s, "second", len(nannies))
        before = engine(s).dispatcher.statistics["second"].successes
        futures = [chain(row(i)) for i in range(COUNT)]
        # At the beginning of the chains, and when some are through.
        through = before + death * COUNT // DEATHS
        await kill_one_that_runs(s, nannies, "second", through)
        for i, future in enumerate(futures):
            assert np.array_equal(await future, row(4 * i)), death
    s.validate_state()
    for model in (first, second):
        status = await model.status()
        assert (status.waiting, status.in_flight, status.failures) == (0, 0, 0)
    del futures, future
    await nothing_is_left(s)


#: The other model is built when the test says so.
_may_build = threading.Event()


def build_late() -> Any:
    assert _may_build.wait(30)
    return linear(1, 1)


@pytest.mark.parametrize("warmup", [None, ONE.astype("float32")], ids=["cold", "warm"])
@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1)],
    config={"daskinfer.loading-threads": 2},
    # Dask runs callbacks of futures on a thread that stays.
    clean_kwargs={"threads": False},
)
async def test_a_model_whose_other_one_is_still_being_loaded(c, s, a, warmup):
    """As on the only worker, when it was started again a moment ago."""
    _may_build.clear()
    inner = await daskinfer.deploy(
        c, factory=f"{__name__}:build_late", name="inner", wait=False, warmup=warmup
    )
    outer = await deploy(c, calling(inner), "outer", max_batch_size=4)
    x = ONE.astype("float32")
    futures = outer.map([x] * 8)
    await until(lambda: len(engine(s).dispatcher.lines["inner", "1"].queue) > 0)
    _may_build.set()
    expected = linear(1, 1)
    import torch

    with torch.no_grad():
        right = expected(torch.from_numpy(x)).numpy() + 1
    for future in futures:
        np.testing.assert_allclose(np.asarray(await future), right)
    await inner.submit(x)
    s.validate_state()
    del futures, future
    await nothing_is_left(s, a)


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1), ("127.0.0.1", 1, {"resources": {"SPECIAL": 1}})],
    clean_kwargs={"threads": False},
)
async def test_a_model_whose_other_one_is_on_other_workers(c, s, a, b):
    inner = await deploy(c, doubling(), "inner", resources={"SPECIAL": 1})
    outer = await deploy(c, calling(inner), "outer", max_batch_size=4)
    assert set(engine(s).dispatcher.lines["inner", "1"].devices) == {b.address}
    futures = outer.options(workers=[a.address]).map([row(i) for i in range(20)])
    futures += outer.options(workers=[b.address]).map([row(i) for i in range(20)])
    for i, future in enumerate(futures):
        assert np.array_equal(await future, row(2 * (i % 20) + 1))
    del futures, future
    await nothing_is_left(s, a, b)
