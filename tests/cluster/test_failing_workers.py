"""Workers that fail what others can do, in a cluster."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import numpy as np
from distributed import get_worker, wait
from distributed.utils_test import gen_cluster

from daskinfer import BreakerPolicy
from tests.cluster.helpers import Probe
from tests.cluster.scheduling_helpers import ONE, deploy, nothing_is_left

THREE_WORKERS = [("127.0.0.1", 1)] * 3


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


@gen_cluster(client=True, nthreads=THREE_WORKERS)
async def test_a_worker_that_always_fails_fast_does_not_look_idle(c, s, *workers):
    bad = workers[0].address
    ran: Counter[str] = Counter()

    def answer(x: np.ndarray) -> np.ndarray:
        here = get_worker().address
        ran[here] += 1
        if here == bad:
            raise RuntimeError("no such kernel")
        time.sleep(0.02)
        return x * 2

    breaker = BreakerPolicy(cooldown="1h", max_cooldown="1h")
    model = await deploy(c, Probe(answer), max_batch_size=1, breaker=breaker)
    # It has no example, so that nobody fails the warm-up.
    futures = model.map([row(i) for i in range(300)])
    await wait(futures)
    failed = [future for future in futures if future.status == "error"]
    assert len(failed) == ran[bad] > 0
    healthy = [ran[w.address] for w in workers[1:]]
    # A twentieth of the requests at most, although it took no time for them.
    assert ran[bad] <= min(healthy) and ran[bad] <= 15, ran
    status = await model.status()
    by_address = {w.address: w for w in status.workers}
    assert (by_address[bad].breaker, by_address[bad].healthy) == ("open", False)
    assert "batches failed (RuntimeError), which" in by_address[bad].reason
    # What a model says may hold inputs, and pages show the reason.
    assert "no such kernel" not in by_address[bad].reason
    assert all(by_address[w.address].healthy for w in workers[1:])
    # From now on it has none.
    before = ran[bad]
    more = model.map([row(i) for i in range(100)])
    for i, future in enumerate(more):
        assert np.array_equal(await future, row(2 * i))
    assert ran[bad] == before
    del futures, failed, more, future
    await nothing_is_left(s, *workers)


@gen_cluster(client=True, nthreads=THREE_WORKERS)
async def test_a_retry_is_not_given_to_who_has_just_failed_it(c, s, *workers):
    attempts: dict[float, list[str]] = defaultdict(list)

    def answer(x: np.ndarray) -> np.ndarray:
        tried = attempts[float(x[0, 0])]
        tried.append(get_worker().address)
        time.sleep(0.001)
        if len(tried) < 3:
            raise ArithmeticError(f"attempt {len(tried)}")
        return x * 2

    model = await deploy(c, Probe(answer), max_batch_size=1)
    futures = [
        *model.options(retries=2).map([row(i) for i in range(100)]),
        *(c.submit(model, row(100 + i), retries=2) for i in range(20)),
    ]
    for i, future in enumerate(futures):
        assert np.array_equal(await future, row(2 * i))
    # All three workers, however busy each of them was.
    everywhere = {w.address for w in workers}
    for value, tried in attempts.items():
        assert len(tried) == 3 and set(tried) == everywhere, (value, tried)
    # Alone on an idle cluster, where the one that has failed is as free as the others.
    for i in range(200, 210):
        future = model.options(retries=2).submit(row(i))
        assert np.array_equal(await future, row(2 * i))
        assert set(attempts[float(i)]) == everywhere
    del futures, future
    await nothing_is_left(s, *workers)


@gen_cluster(client=True, nthreads=THREE_WORKERS)
async def test_who_has_failed_is_better_than_nobody(c, s, *workers):
    attempts: list[str] = []

    def answer(x: np.ndarray) -> np.ndarray:
        attempts.append(get_worker().address)
        if len(attempts) < 3:
            raise ArithmeticError(len(attempts))
        return x * 2

    model = await deploy(c, Probe(answer))
    pinned = model.options(retries=2, workers=[workers[0].address])
    assert np.array_equal(await pinned.submit(ONE), 2 * ONE)
    assert attempts == [workers[0].address] * 3
