"""What Dask's users do with futures and clusters, with requests in them."""

from __future__ import annotations

import threading
from collections import Counter

import dask
import numpy as np
import pytest
from distributed import (
    Client,
    LocalCluster,
    Queue,
    Variable,
    as_completed,
    fire_and_forget,
    get_task_stream,
    performance_report,
    progress,
    wait,
)
from distributed.diagnostics.progressbar import TextProgressBar
from distributed.utils_test import gen_cluster, inc

import daskinfer
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, nothing_is_left

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
async def test_as_completed(c, s, a, b, way):
    model = await deploy(c, Probe())
    futures = [ask(c, way, model, row(i)) for i in range(30)]
    seen = []
    async for future, result in as_completed(futures, with_results=True):
        assert future in futures
        seen.append(result.item())
    assert sorted(seen) == [2 * i for i in range(30)]


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_fire_and_forget(c, s, a, b, way):
    probe = Probe(is_open=False)
    model = await deploy(c, probe)
    future = ask(c, way, model, ONE)
    fire_and_forget(future)
    await probe.entered()
    del future
    # Nobody holds it any more, and it goes on all the same.
    await until(lambda: [set(cs.wants_what) for cs in s.clients.values()].count(set()))
    probe.open()
    await until(lambda: not s.tasks)
    assert (await model.status()).successes == 1
    await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_variable_and_queue_hand_futures_on(c, s, a, b, way):
    model = await deploy(c, Probe())
    variable, queue = Variable("v"), Queue("q")
    await variable.set(ask(c, way, model, row(1)))
    await queue.put(ask(c, way, model, row(2)))
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        stored = await Variable("v", client=other).get()
        assert np.array_equal(await stored, row(2))
        passed = await Queue("q", client=other).get()
        assert np.array_equal(await passed, row(4))
        del stored, passed
    variable.delete()
    queue.close()
    await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_published_answers_outlive_their_client(c, s, a, b, way):
    model = await deploy(c, Probe())
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        mine = type(model)("m", client=other)
        future = ask(other, way, mine, ONE)
        # Dask publishes over another connection, which may be faster.
        key = future.key
        await until(lambda: key in s.tasks)
        await other.publish_dataset(answer=future)
        del future
    assert np.array_equal(await (await c.get_dataset("answer")), 2 * ONE)
    await c.unpublish_dataset("answer")
    await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_failed_request_can_be_retried(c, s, a, b, way):
    broken = True

    def work(x):
        if broken:
            raise ValueError("out of order")
        return x

    model = await deploy(c, Probe(work))
    future = ask(c, way, model, ONE)
    dependent = c.submit(np.sum, future)
    with pytest.raises(ValueError, match="out of order"):
        await dependent
    assert future.status == "error"
    broken = False
    await c.retry([dependent])
    assert await dependent == 1
    assert np.array_equal(await future, ONE)
    status = await model.status()
    assert (status.requests, status.successes, status.failures) == (2, 1, 1)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_key_submitted_twice_is_computed_once(c, s, a, b, way):
    probe = Probe(is_open=False)
    model = await deploy(c, probe)
    futures = [ask(c, way, model, ONE, key="k") for _ in range(3)]
    await probe.entered()
    futures.append(ask(c, way, model, ONE, key="k"))
    probe.open()
    await wait(futures)
    futures.append(ask(c, way, model, ONE, key="k"))
    for future in futures:
        assert np.array_equal(await future, 2 * ONE)
    assert probe.rows == [1]
    assert (await model.status()).requests == 1


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_key_of_two_clients_is_computed_once(c, s, a, b, way):
    probe = Probe(is_open=False)
    model = await deploy(c, probe)
    mine = ask(c, way, model, ONE, key="k")
    await probe.entered()
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        handle = type(model)("m", client=other)
        # One comes while it runs, one when it is there.
        theirs = ask(other, way, handle, ONE, key="k")
        await until(lambda: len(s.tasks["k"].who_wants) == 2)
        probe.open()
        assert np.array_equal(await theirs, 2 * ONE)
        assert np.array_equal(await mine, 2 * ONE)
        del mine
        late = ask(other, way, handle, ONE, key="k")
        assert np.array_equal(await late, 2 * ONE)
        del theirs, late
    assert probe.rows == [1]
    await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_key_is_computed_again_after_its_release(c, s, a, b, way):
    probe = Probe()
    model = await deploy(c, probe)
    for value in (1, 2, 3):
        future = ask(c, way, model, row(value), key="k")
        assert np.array_equal(await future, row(2 * value))
        del future
        await nothing_is_left(s, a, b)
    assert probe.rows == [1, 1, 1]


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_persist_and_compute_graphs_with_requests(c, s, a, b):
    model = await deploy(c, Probe())
    double = dask.delayed(model)
    total = dask.delayed(sum)([double(row(i)) for i in range(10)])
    assert (await c.compute(total)).item() == 90
    kept = c.persist(double(row(7)))
    assert (await c.compute(kept)).item() == 14


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_the_task_stream_shows_each_request(c, s, a, b, way):
    model = await deploy(c, Probe())
    async with get_task_stream() as stream:
        await wait([ask(c, way, model, row(i)) for i in range(20)])
        await c.submit(inc, 1)
    names = Counter(str(entry["key"]).rpartition("-")[0] for entry in stream.data)
    assert names["m"] == 20
    assert names["inc"] == 1
    for entry in stream.data:
        assert entry["worker"] in (a.address, b.address)
        for part in entry["startstops"]:
            assert part["start"] <= part["stop"]


@both_ways
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_dump_of_the_cluster_holds_requests(c, s, a, b, way, tmp_path):
    probe = Probe(is_open=False)
    model = await deploy(c, probe, max_batch_size=1)
    futures = [ask(c, way, model, row(i)) for i in range(10)]
    await probe.entered(2)
    # Each way sends them one by one.
    await until(lambda: all(future.key in s.tasks for future in futures))
    target = str(tmp_path / "dump")
    await c.dump_cluster_state(target, format="yaml")
    state = (tmp_path / "dump.yaml").read_text()
    assert all(future.key in state for future in futures)
    story = await c.story(futures[0].key) if hasattr(c, "story") else None
    assert story is None or story
    probe.open()
    await wait(futures)


@pytest.fixture(scope="module")
def blocking_client():
    """A client as in a script."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def model(blocking_client):
    handle = daskinfer.deploy(blocking_client, Probe(), name="m")
    yield handle
    handle.undeploy()


@both_ways
def test_text_progress_bar(blocking_client, model, way, capsys):
    futures = [ask(blocking_client, way, model, row(i)) for i in range(20)]
    bar = TextProgressBar(futures, complete=True, loop=blocking_client.loop)
    blocking_client.sync(bar.listen)
    assert "100% Completed" in capsys.readouterr().out


@both_ways
def test_progress(blocking_client, model, way, capsys):
    futures = [ask(blocking_client, way, model, row(i)) for i in range(20)]
    progress(futures, notebook=False)
    assert "100% Completed" in capsys.readouterr().out


@both_ways
def test_performance_report(blocking_client, model, way, tmp_path):
    pytest.importorskip("bokeh")
    target = tmp_path / "report.html"
    with performance_report(filename=str(target)):
        futures = [ask(blocking_client, way, model, row(i)) for i in range(20)]
        wait(futures)
    assert "Dask Performance Report" in target.read_text("utf-8")


def test_callbacks_of_futures_are_called(blocking_client, model):
    called = threading.Event()
    future = model.submit(ONE)
    future.add_done_callback(lambda done: called.set())
    assert called.wait(30)
    assert future.done()


def test_a_script_may_wait_in_threads(blocking_client, model):
    results = {}

    def ask_many(thread):
        results[thread] = [model(row(100 * thread + i)).item() for i in range(20)]

    threads = [threading.Thread(target=ask_many, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [2 * (100 * n + i) for i in range(20)] for n in range(4)}
