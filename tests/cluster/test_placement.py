"""Which worker runs what."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import gen_cluster

import daskinfer
from scheduler_plugins.placement import Candidate, Placement
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine

TWO_WORKERS = [("127.0.0.1", 1)] * 2
FOUR_WORKERS = [("127.0.0.1", 1)] * 4


def row(value: float) -> np.ndarray:
    return np.full((1, 1), value)


async def ran_on(futures) -> Counter[str]:
    return Counter([(await daskinfer.info(future)).worker for future in futures])


class Turnstile(Probe):
    """A probe that lets one call pass at a time."""

    def __init__(self) -> None:
        super().__init__(self._pass)
        self._permits = threading.Semaphore(0)
        self.passed = 0

    def _pass(self, x):
        assert self._permits.acquire(timeout=30)
        self.passed += 1
        return x

    def admit(self, calls: int = 1) -> None:
        self._permits.release(calls)


@gen_cluster(client=True, nthreads=FOUR_WORKERS)
async def test_equal_workers_have_equally_many_batches(c, s, *workers):
    model_code = Turnstile()
    model = await deploy(c, model_code, max_batch_size=1)
    futures = model.map([row(i) for i in range(60)])
    for done in range(40):
        # None idles while requests wait, whichever of them has just ended.
        await until(lambda done=done: len(model_code.calls) == done + 4)
        in_flight = Counter(
            b.device.name for b in engine(s).dispatcher.running.batches.values()
        )
        assert len(in_flight) == 4
        assert max(in_flight.values()) - min(in_flight.values()) <= 1
        model_code.admit()
    model_code.admit(20)
    await wait(futures)
    assert set(await ran_on(futures)) == {w.address for w in workers}


class Uneven:
    """Takes ten times as long on some workers, however many rows there are."""

    def __init__(self, slow: set[str], seconds: float) -> None:
        self.slow = slow
        self.seconds = seconds

    def __call__(self, x):
        from distributed import get_worker

        factor = 10 if get_worker().address in self.slow else 1
        time.sleep(factor * self.seconds * len(x))
        return x


@gen_cluster(client=True, nthreads=FOUR_WORKERS)
async def test_slow_workers_get_a_small_part(c, s, *workers):
    slow = {w.address for w in workers[:2]}
    model = await deploy(c, Probe(Uneven(slow, 0.004)), max_batch_size=2, warmup=ONE)
    futures = []
    # Two at a time: half of what the fast ones can do.
    for i in range(60):
        pair = model.map([row(2 * i), row(2 * i + 1)])
        await wait(pair)
        futures += pair
    counts = await ran_on(futures)
    least_fast = min(counts[worker.address] for worker in workers[2:])
    assert max(counts[address] for address in slow) <= least_fast / 10


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_round_robin_takes_turns(c, s, a, b):
    model = await deploy(c, Probe(), placement="round-robin", warmup=ONE)
    workers = []
    for i in range(10):
        future = model.submit(row(i))
        await future
        workers.append((await daskinfer.info(future)).worker)
    assert len(set(workers[::2])) == len(set(workers[1::2])) == 1
    assert set(workers) == {a.address, b.address}


class Last(Placement):
    """Takes the last of the candidates by name."""

    def choose(self, candidates, now: float) -> Candidate:
        return max(candidates, key=lambda candidate: candidate.device.name)


@pytest.mark.parametrize("given", ["path", "class"])
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_users_own_placement_decides(c, s, a, b, given):
    spec = Last if given == "class" else f"{__name__}.Last"
    model = await deploy(c, Probe(), placement=spec, warmup=ONE)
    futures = []
    for i in range(6):
        futures.append(model.submit(row(i)))
        await futures[-1]
    assert set(await ran_on(futures)) == {max(a.address, b.address)}


class Broken(Placement):
    """Takes none."""

    def choose(self, candidates, now: float) -> Candidate:
        raise ZeroDivisionError("no idea")


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_users_placement_that_fails_fails_its_requests(c, s, a, b):
    broken = await deploy(c, Probe(), "broken", placement=Broken)
    sound = await deploy(c, Probe(), "sound")
    hopeless = broken.submit(ONE)
    assert np.array_equal(await sound.submit(ONE), 2 * ONE)
    with pytest.raises(ZeroDivisionError, match="no idea"):
        await hopeless
    assert (await broken.status()).failures == 1


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_placement_that_is_not_there_is_refused(c, s, a, b):
    with pytest.raises(ValueError, match=r"'no\.such\.Class' cannot be imported"):
        await deploy(c, Probe(), placement="no.such.Class")
    assert await daskinfer.deployments(c) == []


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_run_where_their_inputs_are(c, s, a, b):
    probe = Probe(lambda x: x[:, :1])
    model = await deploy(c, probe, warmup=np.zeros((1, 125_000)))
    probe.calls.clear()
    # A megabyte each: sending it costs more than the model does.
    blocks = [np.full((1, 125_000), float(i)) for i in range(8)]
    for worker in (a, b, a):
        scattered = await c.scatter(blocks, workers=[worker.address], hash=False)
        futures = model.map(scattered)
        await wait(futures)
        assert set(await ran_on(futures)) == {worker.address}
        for i, y in enumerate(await daskinfer.gather(futures)):
            assert y.item() == i
        del scattered, futures
    # Together, where they may.
    assert max(probe.rows) > 1


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_inputs_travel_where_their_holder_may_not_run(c, s, a, b):
    model = await deploy(c, Probe(lambda x: x[:, :1]))
    block = await c.scatter(np.ones((1, 125_000)), workers=[a.address])
    future = model.options(workers=[b.address]).submit(block)
    assert (await future).item() == 1
    assert set(await ran_on([future])) == {b.address}
