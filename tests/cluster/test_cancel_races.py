"""Cancelling at every moment of a request's life, many times over."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from distributed import CancelledError, Future
from distributed.utils_test import gen_cluster

from daskinfer import BreakerPolicy, RetryPolicy, transport
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


@pytest.mark.parametrize("moment", ["queued", "dispatched", "running", "completed"])
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_cancelled_at(c, s, a, b, moment):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=4, warmup=ONE)
    dispatcher = engine(s).dispatcher
    probe.calls.clear()
    probe.close()
    futures = model.map([row(i) for i in range(40)])

    async def cancelled() -> None:
        await c.cancel(futures[::2])

    if moment == "queued":
        await cancelled()
    elif moment == "dispatched":
        # The batch has left; the worker may not have it yet.
        await until(lambda: bool(dispatcher.running.batches))
        await cancelled()
    elif moment == "running":
        await probe.entered()
        await cancelled()
    else:
        # The answers are on their way while the cancellation is.
        await probe.entered()
        probe.open()
        await cancelled()
    probe.open()
    for i, future in enumerate(futures):
        if i % 2:
            assert np.array_equal(await future, row(2 * i))
        else:
            assert future.status == "cancelled"
            with pytest.raises(CancelledError):
                await future
    # No slot is lost: everything is served as before.
    assert np.array_equal(await model.submit(row(99)), row(198))
    status = await model.status()
    assert (status.waiting, status.in_flight) == (0, 0)
    assert status.requests == 41
    assert status.successes + status.cancelled >= 41
    futures.clear()
    del future
    await nothing_is_left(s, a, b)


@pytest.mark.parametrize("seed", range(3))
@gen_cluster(client=True, nthreads=TWO_WORKERS, timeout=60)
async def test_cancelled_at_random(c, s, a, b, seed):
    chance = random.Random(seed)
    model = await deploy(c, Probe(), max_batch_size=8, warmup=ONE)
    kept = []
    for i in range(60):
        futures = model.options(timeout="1h").map([row(100 * i + j) for j in range(10)])
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        gone = chance.sample(range(10), chance.randrange(10))
        if gone:
            await c.cancel([futures[j] for j in gone])
        kept += [(100 * i + j, f) for j, f in enumerate(futures) if j not in gone]
    for value, future in kept:
        assert np.array_equal(await future, row(2 * value))
    s.validate_state()
    status = await model.status()
    assert (status.waiting, status.in_flight, status.failures) == (0, 0, 0)
    kept.clear()
    del futures, future
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_late_result_is_not_that_of_a_new_request_with_the_same_key(c, s, a):
    probe = Probe()
    model = await deploy(
        c,
        probe,
        warmup=ONE,
        batch_timeout="50ms",
        retry=RetryPolicy(backoff="1h", max_backoff="1h"),
        breaker=BreakerPolicy(cooldown="50ms", max_cooldown="50ms"),
    )
    probe.calls.clear()
    probe.close()
    dispatcher, requests = engine(s).dispatcher, engine(s).requests
    old = model.options(key="k").submit(row(1))
    await until(lambda: len(dispatcher.recovery.delayed) == 1)
    await old.cancel()
    await until(lambda: not requests)
    new = model.options(key="k").submit(row(5))
    await until(lambda: "k" in requests)
    probe.open()
    assert np.array_equal(await new, row(10))
    del old, new
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_late_failure_is_not_that_of_a_new_request_with_the_same_key(c, s, a):
    def refuse_one(x: np.ndarray) -> np.ndarray:
        if (x == 1).any():
            raise ArithmeticError("one")
        return x * 2

    probe = Probe(refuse_one)
    model = await deploy(c, probe, warmup=row(3), max_batch_size=1)
    probe.calls.clear()
    probe.close()
    requests = engine(s).requests
    old = model.options(key="k").submit(row(1))
    await probe.entered()
    # Behind them, the new one waits in the queue when the old one fails.
    others = model.map([row(7), row(8)])
    await old.cancel()
    await until(lambda: "k" not in requests)
    new = model.options(key="k").submit(row(5))
    await until(lambda: "k" in requests)
    probe.open()
    assert np.array_equal(await new, row(10))
    assert [(await other).item() for other in others] == [14, 16]
    del old, new, others
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_refusal_is_not_that_of_a_new_request_with_the_same_key(c, s, a):
    await deploy(c, Probe(), warmup=ONE)
    plugin = engine(s)

    def ask(name: str, value: float) -> None:
        plugin.submit(
            client=c.id,
            keys=["k"],
            name=name,
            version=None,
            payloads=[bytes(transport.dumps(((row(value),), {}))[0])],
            signatures=["one row"],
            rows=[1],
            dependencies={},
            priority=0,
            retries=0,
            workers=None,
            allow_other_workers=False,
            resources=None,
            inline=0,
            timeout=None,
            contents={},
            stream=None,
        )

    # All of it reaches the scheduler in one message.
    ask("unknown", 1)
    s.client_releases_keys(keys=["k"], client=c.id)
    assert not plugin.requests
    ask("m", 5)
    new = Future("k", c)
    assert np.array_equal(await new, row(10))
    del new
    await nothing_is_left(s, a)
