"""Status, counted again from outside."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import FrozenInstanceError, dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from distributed import Client, Worker, get_worker
from distributed.core import Status
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import BatchPolicy
from daskinfer.worker.loading import Loader
from tests.cluster.helpers import Local, Probe, until


@dataclass
class Call:
    """One call of the model, as the model saw it."""

    worker: str
    requests: int
    rows: int
    seconds: float


class Ledger(Local):
    """A model on rows ``(request, value)`` that keeps its own accounts."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, x: Any) -> Any:
        started = time.perf_counter()
        bad = (x[:, 1] < 0).any()
        answer = x * 2
        requests = len(set(x[:, 0]))
        seconds = time.perf_counter() - started
        self.calls.append(Call(get_worker().address, requests, len(x), seconds))
        if bad:
            raise ArithmeticError("negative")
        return answer


def request(number: int, rows: int, value: float = 1.0) -> np.ndarray:
    return np.array([[number, value]] * rows)


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_recount(client: Client, scheduler: Any, a: Any, b: Any, c: Any) -> None:
    ledger = Ledger()
    model = await daskinfer.deploy(client, ledger, name="ledger", version="7")
    rng = np.random.default_rng(0)
    sizes = [int(rows) for rows in rng.integers(1, 5, 200)]
    started = time.perf_counter()
    futures = [model.submit(request(i, rows)) for i, rows in enumerate(sizes[:100])]
    futures += [
        client.submit(model, request(i + 100, rows))
        for i, rows in enumerate(sizes[100:])
    ]
    await client.gather(futures)
    # Alone in the queue, so that no good one fails with them.
    for number in (900, 901, 902):
        with pytest.raises(ArithmeticError):
            await model.submit(request(number, 2, -1.0))
    status = await model.status()
    elapsed = time.perf_counter() - started

    assert (status.name, status.active_version) == ("ledger", "7")
    assert (status.requests, status.successes, status.failures) == (203, 200, 3)
    assert (status.cancelled, status.waiting, status.in_flight) == (0, 0, 0)
    assert status.problem is None

    # A call that raised is no pass: it has no duration to learn from.
    answered = [call for call in ledger.calls if call.rows]
    assert status.passes == len(answered) - 3
    assert status.rows == sum(sizes)
    assert status.padded_rows == 0
    assert status.mean_batch_size == pytest.approx(sum(sizes) / status.passes)
    infos = [await daskinfer.info(future) for future in futures]
    assert 1 <= status.batches <= status.passes + 3

    assert [w.address for w in status.workers] == sorted(w.address for w in (a, b, c))
    rows_by_worker: Counter[str] = Counter()
    for call in ledger.calls[:-3]:
        rows_by_worker[call.worker] += call.rows
    of_futures: Counter[str] = Counter()
    for info, rows in zip(infos, sizes, strict=True):
        of_futures[info.worker] += rows
    assert rows_by_worker == of_futures
    for worker in status.workers:
        assert (worker.state, worker.healthy, worker.reason) == ("ready", True, None)
        assert (worker.device, worker.in_flight, worker.load) == ("cpu", 0, 0.0)
        assert worker.rows == rows_by_worker[worker.address]
        mine = [call for call in ledger.calls[:-3] if call.worker == worker.address]
        if mine:
            inside = sum(call.seconds for call in mine) / len(mine)
            assert worker.latency is not None
            assert inside <= worker.latency <= elapsed
        else:
            assert worker.latency is None
    assert sum(worker.batches for worker in status.workers) == status.batches

    latency = status.latency
    assert 0 < latency.p50 <= latency.p95 <= latency.p99 <= elapsed
    assert 0 < latency.mean <= latency.p99
    queued = np.mean([info.queue_seconds for info in infos])
    assert queued <= latency.mean
    assert status.throughput >= 200 / max(elapsed, 10) and status.throughput > 0

    (version,) = status.versions
    assert (version.version, version.active, version.workers_ready) == ("7", True, 3)
    assert len(version.digest) == 64


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_padding(client: Client, scheduler: Any, worker: Any) -> None:
    probe = Probe()
    model = await daskinfer.deploy(
        client, probe, batching=BatchPolicy(allowed_batch_sizes=[1, 4, 16])
    )
    sizes = [1, 2, 3, 5, 4]
    for number, rows in enumerate(sizes):
        x = request(number, rows)
        np.testing.assert_array_equal(await model.submit(x), x * 2)
    assert probe.rows == [1, 4, 4, 16, 4]
    status = await model.status()
    assert status.rows == sum(sizes)
    assert status.padded_rows == sum(probe.rows) - sum(sizes)
    assert status.mean_batch_size == sum(sizes) / 5


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_what_waits_and_what_runs(
    client: Client, scheduler: Any, worker: Any
) -> None:
    probe = Probe(is_open=False)
    model = await daskinfer.deploy(
        client, probe, batching=BatchPolicy(max_batch_size=1)
    )
    futures = [model.submit(request(i, 1)) for i in range(10)]
    await probe.entered()
    status = await model.status()
    assert status.waiting + status.in_flight == status.requests == 10
    assert status.in_flight >= 1 and status.waiting >= 1
    (of_worker,) = status.workers
    assert of_worker.in_flight == status.in_flight
    assert of_worker.load > 0
    assert of_worker.latency is None

    # One that waits, and the one that runs; all the others are answered.
    await client.cancel([futures[0], futures[-1]])
    await until(lambda: futures[0].key not in scheduler.tasks)
    await until(lambda: futures[-1].key not in scheduler.tasks)
    status = await model.status()
    assert status.cancelled == 2
    probe.open()
    await client.gather(futures[1:-1])
    status = await model.status()
    assert (status.requests, status.successes, status.cancelled) == (10, 8, 2)
    assert (status.waiting, status.in_flight) == (0, 0)
    assert len(probe.calls) == 9


@gen_cluster(
    client=True,
    nthreads=[("", 1)],
    # Else Dask lets a worker with free memory go on by itself.
    config={"distributed.worker.memory.pause": False},
)
async def test_health(client: Client, scheduler: Any, worker: Any) -> None:
    model = await daskinfer.deploy(client, Probe())
    worker.status = Status.paused
    await until(lambda: not scheduler.running)
    future = model.submit(request(0, 1))
    status = await model.status()
    assert [(w.state, w.healthy) for w in status.workers] == [("ready", False)]
    await until(lambda: future.key in scheduler.tasks)
    status = await model.status()
    assert status.problem == "every ready worker is paused or closing"
    worker.status = Status.running
    await future
    status = await model.status()
    assert status.workers[0].healthy and status.problem is None


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_workers_come_and_go(client: Client, scheduler: Any, worker: Any) -> None:
    model = await daskinfer.deploy(client, Probe())
    async with Worker(scheduler.address) as late:
        plugin = scheduler.plugins["daskinfer"]
        await until(lambda: late.address in plugin.registry.workers)
        addresses = {w.address for w in (await model.status()).workers}
        assert addresses == {worker.address, late.address}
    (left,) = (await model.status()).workers
    assert left.address == worker.address


@gen_cluster(client=True, nthreads=[("", 1), ("", 1, {"resources": {"NPU": 1}})])
async def test_workers_that_may_not_serve_it(
    client: Client, scheduler: Any, plain: Any, npu: Any
) -> None:
    model = await daskinfer.deploy(client, Probe(), resources={"NPU": 1})
    states = {w.address: w for w in (await model.status()).workers}
    assert states[npu.address].state == "ready"
    refused = states[plain.address]
    assert (refused.state, refused.healthy) == ("ineligible", False)
    assert refused.reason == "it lacks NPU=1 (it has none)"


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_is_a_snapshot(client: Client, scheduler: Any, worker: Any) -> None:
    model = await daskinfer.deploy(client, Probe())
    before = await model.status()
    with pytest.raises(FrozenInstanceError):
        before.requests = 5  # type: ignore[misc]
    await asyncio.gather(*model.map([request(i, 1) for i in range(3)]))
    after = await model.status()
    assert (before.requests, after.requests) == (0, 3)
    assert before.mean_batch_size is None and before.latency.p50 is None


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_two_deployments_count_apart(
    client: Client, scheduler: Any, worker: Any
) -> None:
    one = await daskinfer.deploy(client, Probe(), name="one")
    two = await daskinfer.deploy(client, Probe(), name="two")
    await asyncio.gather(
        *one.map([request(i, 1) for i in range(3)]),
        *two.map([request(i, 2) for i in range(5)]),
    )
    of_one, of_two = await one.status(), await two.status()
    assert (of_one.successes, of_one.rows) == (3, 3)
    assert (of_two.successes, of_two.rows) == (5, 10)


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_workers_that_have_not_said_what_they_have_are_starting(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    said = asyncio.Event()
    detect = Loader.detect

    async def hold_back(loader: Loader) -> Any:
        await said.wait()
        return await detect(loader)

    with mock.patch.object(Loader, "detect", hold_back):
        model = await daskinfer.deploy(client, lambda x: x, name="f", wait=False)
        status = await model.status()
        assert [worker.state for worker in status.workers] == ["starting"] * 2
        assert status.problem is not None
        assert status.problem.startswith("2 workers are starting")
        said.set()
        await model.submit(np.ones((1, 2)))
    status = await model.status()
    assert status.problem is None
    assert "ready" in {worker.state for worker in status.workers}
