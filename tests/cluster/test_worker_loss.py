"""Worker processes that die, and what becomes of the requests on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import Nanny, Worker, wait
from distributed.scheduler import KilledWorker
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import NoReadyWorker, RetryPolicy, WorkerLost
from tests.cluster.helpers import SCHEME, Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

TWO_WORKERS = [("127.0.0.1", 1)] * 2

#: Dask's own settings, at their worst.
UNFRIENDLY = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.no-workers-timeout": "1ms",
    "distributed.scheduler.worker-ttl": "1s",
}

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def deadly() -> Any:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: np.ndarray) -> np.ndarray:
        import os

        if (x == 13).any():
            os._exit(1)
        return x + 1

    return answer


def ask_all(client: Any, way: str, model: Any, xs: list[Any]) -> list[Any]:
    return client.map(model, xs) if way == "client" else model.map(xs)


@both_ways
@gen_cluster(
    client=True,
    nthreads=TWO_WORKERS,
    Worker=Nanny,
    config=UNFRIENDLY,
    timeout=120,
)
async def test_a_deadly_input_dies_alone(c, s, a, b, way):
    model = await deploy(c, deadly(), max_batch_size=64)
    futures = ask_all(c, way, model, [row(i) for i in range(64)])
    await wait(futures)
    deaths = s._workers_removed_total
    deadly_one = engine(s).requests[futures[13].key]
    for i, future in enumerate(futures):
        if i != 13:
            assert np.array_equal(await future, row(i + 1))
    error = await futures[13].exception()
    assert isinstance(error, WorkerLost) and isinstance(error, KilledWorker)
    assert (error.key, error.name, error.version) == (futures[13].key, "m", "1")
    assert error.worker.startswith(SCHEME)
    # The bound that is documented. Where its batch had begun although the answer of
    # the one before was still on its way, that one is charged, and it is a bystander.
    # It may have been alone from the start.
    assert deadly_one.solo in (2, 3)
    in_company = deadly_one.solo < deadly_one.charges
    assert ("while it ran nothing else" in str(error)) == in_company
    assert deadly_one.charges <= 4 and deadly_one.bystander <= 2
    assert error.attempts == deaths == deadly_one.charges + deadly_one.bystander
    status = await model.status()
    # Results that died with a worker before they were fetched were computed again.
    assert (status.requests, status.failures) == (status.successes + 1, 1)
    assert status.requests >= 64
    assert (status.waiting, status.in_flight) == (0, 0)
    assert np.array_equal(await model.submit(row(20)), row(21))
    del futures, future, deadly_one, error
    await nothing_is_left(s)


@gen_cluster(client=True, nthreads=TWO_WORKERS, Worker=Nanny, timeout=120)
async def test_explicit_retries_are_honoured_exactly(c, s, a, b):
    model = await deploy(c, deadly(), retry=RetryPolicy(max_attempts=1))
    future = model.options(retries=2).submit(row(13))
    error = await future.exception()
    assert isinstance(error, WorkerLost)
    assert error.attempts == s._workers_removed_total == 3


@gen_cluster(client=True, nthreads=TWO_WORKERS, Worker=Nanny, timeout=120)
async def test_without_retries_one_death_is_enough_for_a_request_alone(c, s, a, b):
    model = await deploy(c, deadly(), retry=RetryPolicy(max_attempts=1))
    plain = c.submit(model, row(13))
    assert isinstance(await plain.exception(), WorkerLost)
    assert s._workers_removed_total == 1
    # A new try of the user's has a new budget.
    await plain.retry()
    assert isinstance(await plain.exception(), WorkerLost)
    assert s._workers_removed_total == 2


@gen_cluster(client=True, nthreads=TWO_WORKERS, config=UNFRIENDLY)
async def test_a_worker_that_is_retired_charges_nobody(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=4, warmup=ONE)
    probe.close()
    futures = model.map([row(i) for i in range(16)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 4)
    requests = list(engine(s).requests.values())
    await s.retire_workers([a.address])
    assert a.address not in s.workers
    assert [(r.charges, r.bystander, r.group) for r in requests] == [(0, 0, None)] * 16
    await b.close_gracefully()
    assert [(r.charges, r.bystander, r.group) for r in requests] == [(0, 0, None)] * 16
    probe.open()
    async with Worker(s.address):
        for i, future in enumerate(futures):
            assert np.array_equal(await future, row(2 * i))


@gen_cluster(client=True, nthreads=TWO_WORKERS, config=UNFRIENDLY)
async def test_requests_wait_when_all_workers_are_gone(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.close()
    futures = [*model.map([row(i) for i in range(8)]), c.submit(model, row(8))]
    await until(lambda: len(engine(s).dispatcher.running.batches) == 4)
    for worker in (a, b):
        # As if the process were gone: it says no word of goodbye.
        await s.remove_worker(worker.address, stimulus_id="test", close=False)
    await queued(s, 9)
    status = await model.status()
    assert (status.waiting, status.in_flight) == (9, 0)
    assert "no worker" in status.problem
    # Dask's time-outs have their chance.
    s._check_no_workers()
    await s.check_worker_ttl()
    assert {f.status for f in futures} == {"pending"}
    probe.open()
    async with Worker(s.address):
        for i, future in enumerate(futures):
            assert np.array_equal(await future, row(2 * i))
    status = await model.status()
    assert (status.successes, status.failures) == (9, 0)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS, config=UNFRIENDLY)
async def test_a_deadline_ends_in_time_when_all_workers_are_gone(c, s, a, b, way):
    probe = Probe()
    model = await deploy(
        c, probe, max_batch_size=1, warmup=ONE, request_timeout="500ms"
    )
    patient = model.options(timeout="1h")
    probe.close()
    futures = ask_all(c, way, model, [row(i) for i in range(8)])
    others = patient.map([row(i) for i in range(8)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 4)
    for worker in (a, b):
        await s.remove_worker(worker.address, stimulus_id="test", close=False)
    for future in futures:
        error = await future.exception()
        assert isinstance(error, NoReadyWorker) and "no worker" in str(error)
    await queued(s, 8)
    assert "no worker" in (await model.status()).problem
    probe.open()
    async with Worker(s.address):
        for i, future in enumerate(others):
            assert np.array_equal(await future, row(2 * i))
        status = await model.status()
    assert (status.successes, status.failures, status.waiting) == (8, 8, 0)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_only_the_running_batch_is_charged(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=4, warmup=ONE)
    probe.close()
    futures = model.options(workers=[a.address], allow_other_workers=True).map(
        [row(i) for i in range(8)]
    )
    dispatcher = engine(s).dispatcher
    await until(lambda: len(dispatcher.running.batches) == 2)
    first, second = dispatcher.running.batches.values()
    running, behind = list(first.requests.values()), list(second.requests.values())
    await s.remove_worker(a.address, stimulus_id="test", close=False)
    assert [(r.charges, r.solo, r.bystander) for r in running] == [(1, 0, 0)] * 4
    assert [(r.charges, r.solo, r.bystander) for r in behind] == [(0, 0, 1)] * 4
    # Each of four that were together is alone now; the others stay together.
    assert len({r.group for r in running}) == 4
    assert {r.group for r in behind} == {None}
    probe.open()
    assert [float(y[0, 0]) for y in await c.gather(futures)] == [
        2.0 * i for i in range(8)
    ]
    infos = [await daskinfer.info(future) for future in futures]
    assert [info.attempts for info in infos] == [2] * 8
    del futures
    await nothing_is_left(s, b)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_retry_of_the_users_runs_on_another_worker(c, s, a, b):
    seen: list[str] = []

    def refuse(x: np.ndarray) -> np.ndarray:
        from distributed import get_worker

        seen.append(get_worker().address)
        raise ArithmeticError(len(seen))

    model = await deploy(c, Probe(refuse))
    for submit in (
        lambda: model.options(retries=1).submit(ONE),
        lambda: c.submit(model, ONE, retries=1),
    ):
        seen.clear()
        assert isinstance(await submit().exception(), ArithmeticError)
        assert sorted(seen) == sorted([a.address, b.address])
