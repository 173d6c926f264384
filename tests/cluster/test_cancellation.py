"""Requests that nobody wants any more, wherever they are."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import CancelledError, Client, wait
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

#: The calls into Dask's inner workings, also on its oldest supported release.
pytestmark = pytest.mark.smoke

ONE_WORKER = [("127.0.0.1", 1)]

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), value)


def ask(client, way, model, x, **options):
    if way == "client":
        return client.submit(model, x, **options)
    return model.options(**options).submit(x)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_cancelled_queued_request_is_never_computed(c, s, a, way):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    probe.close()
    # The device takes two at a time; the others are in the queue.
    ahead = [ask(c, way, model, row(i)) for i in range(2)]
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    kept, unwanted = ask(c, way, model, row(10)), ask(c, way, model, row(11))
    await queued(s, 2)
    await unwanted.cancel()
    await queued(s, 1)
    probe.open()
    await wait([*ahead, kept])
    assert [args[0].item() for args, _ in probe.calls] == [0, 1, 10]
    status = await model.status()
    assert (status.requests, status.successes, status.cancelled) == (4, 3, 1)
    with pytest.raises(CancelledError):
        await unwanted


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_released_queued_request_is_never_computed(c, s, a, way):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    probe.close()
    ahead = [ask(c, way, model, row(i)) for i in range(2)]
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    unwanted = ask(c, way, model, row(11))
    await queued(s, 1)
    del unwanted
    await queued(s, 0)
    probe.open()
    await wait(ahead)
    assert [args[0].item() for args, _ in probe.calls] == [0, 1]


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_request_cancelled_behind_a_running_batch_is_not_computed(c, s, a, way):
    """It was sent ahead already; the worker learns in time that nobody wants it."""
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    runtime = a.plugins["daskinfer-runtime"]
    probe.calls.clear()
    probe.close()
    first, second = (ask(c, way, model, row(i)) for i in range(2))
    await until(lambda: len(runtime.jobs) == 2)
    await second.cancel()
    await until(lambda: any(job.dropped for job in runtime.jobs.values()))
    probe.open()
    await first
    await until(lambda: not runtime.jobs)
    assert [args[0].item() for args, _ in probe.calls] == [0]


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_result_that_comes_too_late_is_dropped(c, s, a, way):
    probe = Probe()
    model = await deploy(c, probe)
    probe.close()
    unwanted = ask(c, way, model, row(1))
    await probe.entered()
    await unwanted.cancel()
    await until(lambda: not s.tasks)
    probe.open()
    await nothing_is_left(s, a)
    assert np.array_equal(await ask(c, way, model, row(2)), row(4))


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_key_used_again_while_its_old_request_runs_gets_the_new_result(
    c, s, a, way
):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    probe.close()
    old = ask(c, way, model, row(1), key="k")
    await probe.entered()
    await old.cancel()
    await until(lambda: "k" not in s.tasks)
    del old
    new = ask(c, way, model, row(2), key="k")
    await until(lambda: "k" in s.tasks)
    probe.open()
    assert np.array_equal(await new, row(4))
    assert np.array_equal(a.data["k"], row(4))
    del new
    await nothing_is_left(s, a)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_client_that_disconnects_leaves_no_queue_entry(c, s, a, way):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    probe.close()
    ahead = model.submit(row(0))
    await probe.entered()
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        mine = type(model)("m", client=other)
        futures = [ask(other, way, mine, row(i)) for i in range(10, 20)]
        await until(lambda: len(engine(s).requests) == 11)
        del futures
    await until(lambda: len(engine(s).requests) == 1)
    await queued(s, 0)
    probe.open()
    await ahead
    del ahead
    await nothing_is_left(s, a)
    # At most what had been sent ahead has run.
    assert len(probe.calls) <= 2


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_two_clients_want_stays_when_one_cancels(c, s, a, way):
    probe = Probe(is_open=False)
    model = await deploy(c, probe)
    async with Client(s.address, asynchronous=True, set_as_default=False) as other:
        theirs = ask(other, way, type(model)("m", client=other), ONE, key="shared")
        mine = ask(c, way, model, ONE, key="shared")
        await until(lambda: len(getattr(s.tasks.get("shared"), "who_wants", ())) == 2)
        await theirs.cancel()
        del theirs
        await until(lambda: len(s.tasks["shared"].who_wants) == 1)
        probe.open()
        assert np.array_equal(await mine, 2 * ONE)
    assert sum(probe.rows) == 1


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_request_on_an_input_that_is_gone_is_cancelled_alone(c, s, a):
    model = await deploy(c, Probe())
    (gone,) = await c.scatter([ONE])
    await gone.cancel()
    await until(lambda: gone.key not in s.tasks)
    lost, fine = model.submit(gone), model.submit(ONE)
    with pytest.raises(CancelledError):
        await lost
    assert np.array_equal(await fine, 2 * ONE)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_cancelling_an_input_cancels_what_waits_for_it(c, s, a):
    probe = Probe()
    model = await deploy(c, probe)
    task = Probe(is_open=False)
    source = c.submit(task, ONE)
    answer = model.submit(source)
    await until(lambda: len(engine(s).requests) == 1)
    await c.cancel([source], force=True)
    with pytest.raises(CancelledError):
        await answer
    del source, answer
    task.open()
    await nothing_is_left(s, a)
    assert probe.calls == []
