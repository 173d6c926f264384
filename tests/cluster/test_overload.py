"""More requests than may wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import Overloaded
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

ONE_WORKER = [("127.0.0.1", 1)]

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def ask_all(client: Any, way: str, model: Any, xs: list[Any]) -> list[Any]:
    return client.map(model, xs) if way == "client" else model.map(xs)


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
    await until(lambda: sum(f.status == "error" for f in futures) == 990)
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
    assert status.requests == 1003
    await wait(ahead)
    futures.clear()
    del future, ahead
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_what_comes_back_from_a_lost_worker_is_not_turned_away(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=4, warmup=ONE, max_queue=18)
    probe.close()
    futures = model.map([row(i) for i in range(18)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 4)
    await queued(s, 2)
    engine(s).registry.deployment("m").max_queue = 2
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
