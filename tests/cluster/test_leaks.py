"""After the last future is gone nothing is left of it anywhere."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from distributed import Client, Future, Worker, wait
from distributed.utils_test import gen_cluster, inc

import daskinfer
from daskinfer.future import release_all
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import deploy, engine, nothing_is_left

TWO_WORKERS = [("127.0.0.1", 1)] * 2

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), value)


def ask(client, way, model, x, **options):
    if way == "client":
        return client.submit(model, x, **options)
    return model.options(**options).submit(x)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_answered_requests(c, s, a, b, way):
    model = await deploy(c, Probe())
    for _ in range(3):
        futures = [ask(c, way, model, row(i)) for i in range(50)]
        await wait(futures)
        await daskinfer.gather(futures)
        del futures
        await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_failed_requests(c, s, a, b, way):
    def fail(x):
        raise ValueError("no")

    model = await deploy(c, Probe(fail))
    futures = [ask(c, way, model, row(i), retries=i % 3) for i in range(10)]
    await wait(futures)
    assert {future.status for future in futures} == {"error"}
    # Dask's client lets go of failed futures when told to.
    for future in futures:
        future.release()
    del futures, future
    await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_cancelled_at_every_stage(c, s, a, b, way):
    probe = Probe(is_open=False)
    model = await deploy(c, probe, max_batch_size=2)
    futures = [ask(c, way, model, row(i)) for i in range(40)]
    await probe.entered(2)
    await c.cancel(futures)
    del futures
    await until(lambda: not s.tasks)
    probe.open()
    await nothing_is_left(s, a, b)
    status = await model.status()
    assert (status.requests, status.cancelled, status.waiting) == (40, 40, 0)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_chains_of_requests_and_tasks(c, s, a, b, way):
    model = await deploy(c, Probe())
    ends = []
    for i in range(10):
        middle = c.submit(np.negative, ask(c, way, model, row(i)), pure=False)
        ends.append(ask(c, way, model, middle))
        del middle
    results = await daskinfer.gather(ends)
    assert [y.item() for y in results] == [-4 * i for i in range(10)]
    del ends
    await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_of_deployments_that_are_gone(c, s, a, b, way):
    probe = Probe(is_open=False)
    model = await deploy(c, probe, max_batch_size=1)
    futures = [ask(c, way, model, row(i)) for i in range(10)]
    await probe.entered(2)
    await model.undeploy(wait_timeout=0)
    futures.append(ask(c, way, model, row(99)))
    await wait(futures[-1:])
    probe.open()
    await wait(futures)
    statuses = [future.status for future in futures]
    assert statuses.count("error") >= 7
    for future in futures:
        future.release()
    del futures, future
    plugin = engine(s)
    await until(lambda: not s.tasks and not plugin.requests)
    dispatcher = plugin.dispatcher
    assert (dispatcher.lines, dispatcher.running.batches, dispatcher.statistics) == (
        {},
        {},
        {},
    )
    await until(lambda: not a.data and not b.data)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_of_workers_that_are_gone(c, s, a, b, way):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1)
    async with Worker(s.address) as third:
        await until(
            lambda: third.address in engine(s).dispatcher.lines["m", "1"].devices
        )
        probe.close()
        futures = [ask(c, way, model, row(i)) for i in range(20)]
        await until(lambda: third.address in engine(s).dispatcher.running.workers())
        probe.open()
        await wait(futures)
    await wait(futures)
    dispatcher = engine(s).dispatcher
    await until(lambda: third.address not in s.workers)
    assert third.address not in dispatcher.lines["m", "1"].devices
    assert third.address not in dispatcher.statistics["m"].workers
    assert all(address != third.address for address, _ in dispatcher.lines._devices)
    del futures
    await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_of_clients_that_are_gone(c, s, a, b, way):
    model = await deploy(c, Probe())
    for _ in range(3):
        async with Client(s.address, asynchronous=True, set_as_default=False) as other:
            handle = type(model)("m", client=other)
            futures = [ask(other, way, handle, row(i)) for i in range(20)]
            await futures[0]
        del futures
        await nothing_is_left(s, a, b)
    assert len([name for name in s.clients if name.startswith("Client")]) == 1


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_inputs_and_outputs_are_not_kept(c, s, a, b):
    """Neither by the engine, nor by the streams' memory of their messages."""
    seen = []

    def work(x):
        out = x * 2
        seen.extend([weakref.ref(x), weakref.ref(out)])
        return out

    probe = Probe(work)
    model = await deploy(c, probe)
    futures = model.map([np.ones((1, 20_000)) for _ in range(20)])
    await daskinfer.gather(futures)
    del futures
    await nothing_is_left(s, a, b)
    assert seen
    probe.calls.clear()
    assert not any(len(stream.recent_message_log) for stream in s.stream_comms.values())

    def alive() -> int:
        gc.collect()
        return sum(ref() is not None for ref in seen)

    await until(lambda: not alive())


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_users_tasks_are_not_kept_either(c, s, a, b):
    await deploy(c, Probe())
    futures = c.map(inc, range(10))
    await wait(futures)
    del futures
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_many_are_let_go_of_at_once(c, s, a, b):
    model = await deploy(c, Probe())
    futures = model.map([row(i) for i in range(50)])
    await wait(futures)
    key = futures[7].key
    kept = Future(key, c)
    release_all(c, futures)
    await until(lambda: set(s.tasks) == {key})
    assert set(c.futures) == set(c.refcount) == {key}
    assert np.array_equal(await kept, row(14))
    # Once more changes nothing, and neither does the garbage collector.
    release_all(c, futures)
    del futures
    gc.collect()
    assert np.array_equal(await kept, row(14))
    del kept
    await nothing_is_left(s, a, b)
