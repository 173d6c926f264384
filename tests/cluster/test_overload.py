"""More requests than may wait."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import Overloaded
from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
    waiting,
)

ONE_WORKER = [("127.0.0.1", 1)]

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def ask_all(client: Any, way: str, model: Any, xs: list[Any]) -> list[Any]:
    return client.map(model, xs) if way == "client" else model.map(xs)


async def refused(futures: list[Any], count: int) -> None:
    """Wait until so many of the requests have failed."""
    await until(lambda: sum(future.status == "error" for future in futures) == count)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_above_max_queue_fails_at_once(c, s, a, way):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE, max_queue=10)
    probe.close()
    ahead = model.map([row(0), row(1)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    # In one parcel, with room for ten.
    futures = ask_all(c, way, model, [row(i) for i in range(1000)])
    await refused(futures, 990)
    await queued(s, 10)
    for future in futures[10:]:
        error = await future.exception()
        assert isinstance(error, Overloaded)
        assert (error.name, error.retryable) == ("m", False)
    assert "10 requests waiting" in str(error)
    probe.open()
    for i, future in enumerate(futures[:10]):
        assert np.array_equal(await future, row(2 * i))
    # There is room again, for a retry too.
    await futures[500].retry()
    assert np.array_equal(await futures[500], row(1000))
    assert np.array_equal(await model.submit(row(7)), row(14))
    status = await model.status()
    assert status.failures == 990
    # The retry counts again.
    assert status.requests == 1004
    await wait(ahead)
    futures.clear()
    del future, ahead
    await nothing_is_left(s, a)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_twice_as_many_as_the_worker_can_serve(c, s, a, way):
    """Half are turned away while the device is busy; it does not notice."""
    passes = threading.Semaphore(100)

    def answer(x: np.ndarray) -> np.ndarray:
        if not passes.acquire(timeout=PATIENCE):
            raise TimeoutError("the test never allowed this pass")
        return x * 2

    probe = Probe(answer)
    model = await deploy(
        c,
        probe,
        min_batch_size=4,
        max_batch_size=4,
        max_wait="1m",
        max_queue=8,
        request_timeout="1m",
        warmup=ONE,
    )
    probe.calls.clear()
    while passes.acquire(blocking=False):
        pass  # From now on one at a time.
    served = 16
    taken = list(ask_all(c, way, model, [row(i) for i in range(8)]))
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    taken += ask_all(c, way, model, [row(8 + i) for i in range(8)])
    await queued(s, 8)
    for _ in range(20):
        passes.release()
        await queued(s, 4)
        futures = ask_all(c, way, model, [row(served + i) for i in range(8)])
        await refused(futures, 4)
        # The device has two batches all the while, and the queue is full again.
        assert (waiting(s), len(engine(s).dispatcher.running.batches)) == (8, 2)
        for future in futures[4:]:
            assert isinstance(await future.exception(), Overloaded)
        taken += futures[:4]
        served += 8
    for _ in range(4):
        passes.release()
    answers = [float(y[0, 0]) for y in await c.gather(taken)]
    first = list(range(16))
    later = [16 + 8 * wave + i for wave in range(20) for i in range(4)]
    assert answers == [2.0 * value for value in first + later]
    # Full passes only, in the order in which the requests came.
    assert [args[0][:, 0].tolist() for args, _ in probe.calls] == [
        (first + later)[i : i + 4] for i in range(0, len(taken), 4)
    ]
    status = await model.status()
    assert (status.successes, status.failures) == (len(taken), 80)
    assert (status.waiting, status.in_flight) == (0, 0)
    del taken, futures, future
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_what_comes_back_from_a_lost_worker_is_not_turned_away(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=4, warmup=ONE, max_queue=18)
    probe.close()
    futures = model.map([row(i) for i in range(18)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 4)
    await queued(s, 2)
    engine(s).dispatcher.lines["m", "1"].max_queue = 2
    refused = model.submit(row(18))
    assert isinstance(await refused.exception(), Overloaded)
    await s.remove_worker(a.address, stimulus_id="test", close=False)
    await queued(s, 10)
    probe.open()
    for i, future in enumerate(futures):
        assert np.array_equal(await future, row(2 * i))


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_what_was_answered_and_lost_is_not_turned_away(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE, max_queue=3)
    lost = model.options(workers=[a.address], allow_other_workers=True).submit(row(9))
    await wait(lost)
    probe.close()
    ahead = model.options(workers=[b.address]).map([row(0), row(1)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    waiting = model.options(workers=[b.address]).map([row(2), row(3), row(4)])
    await queued(s, 3)
    await s.remove_worker(a.address, stimulus_id="test", close=False)
    await queued(s, 4)
    probe.open()
    assert np.array_equal(await lost, row(18))
    await wait([*ahead, *waiting])


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "many"])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_bad_limits_are_refused(c, s, a, limit):
    with pytest.raises((TypeError, ValueError), match="max_queue"):
        await daskinfer.deploy(c, Probe(), max_queue=limit)
