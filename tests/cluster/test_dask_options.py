"""Dask's own options, given to every way of submitting, are honoured or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Future, futures_of, wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import Model
from daskinfer.exceptions import NotServable
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, queued, waiting

#: The calls into Dask's inner workings, also on its oldest supported release.
pytestmark = pytest.mark.smoke

NODES = [("127.0.0.1", 1)] * 2

every_way = pytest.mark.parametrize(
    "way",
    ["submit", "annotated submit", "delayed", "fast", "annotated fast"],
)


def ask(client: Client, way: str, model: Model, x: Any, **options: Any) -> Future:
    """Send one request with options."""
    if way == "submit":
        return client.submit(model, x, **options)
    if way == "fast":
        return model.options(**options).submit(x)
    with dask.annotate(**options):
        if way == "annotated submit":
            return client.submit(model, x)
        if way == "annotated fast":
            return model.submit(x)
        return client.compute(dask.delayed(model)(x), optimize_graph=False)


def row(value: float) -> np.ndarray:
    return np.full((1, 1), value)


class Flaky:
    """Fails a few times, then goes well."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    def __call__(self, x):
        self.left -= 1
        if self.left >= 0:
            raise OSError("not now")
        return x


@contextmanager
def running_late(probe: Probe) -> Iterator[None]:
    """Hold all calls back within the block."""
    probe.close()
    try:
        yield
    finally:
        probe.open()


@gen_cluster(client=True, nthreads=NODES)
async def test_key_names_the_future(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe)
    slow, fast = c.submit(model, ONE, key="slow"), model.options(key="fast").submit(ONE)
    assert (slow.key, fast.key) == ("slow", "fast")
    assert {"slow", "fast"} == {f.key for f in (await wait([slow, fast])).done}
    assert {"slow", "fast"} <= s.tasks.keys()


@every_way
@gen_cluster(client=True, nthreads=NODES)
async def test_workers_binds_requests(c, s, a, b, way):
    model = await deploy(c, Probe())
    for n, worker in enumerate((a, b, a)):
        futures = [
            ask(c, way, model, row(10 * n + i), workers=[worker.address])
            for i in range(5)
        ]
        await wait(futures)
        ran_on = {(await daskinfer.info(future)).worker for future in futures}
        assert ran_on == {worker.address}


@every_way
@gen_cluster(client=True, nthreads=NODES)
async def test_workers_may_be_named_by_alias_or_host(c, s, a, b, way):
    s.aliases["alice"] = a.address
    model = await deploy(c, Probe())
    named = ask(c, way, model, row(1), workers="alice")
    await named
    assert (await daskinfer.info(named)).worker == a.address
    assert np.array_equal(await ask(c, way, model, row(2), workers="127.0.0.1"), [[4]])


@every_way
@gen_cluster(client=True, nthreads=NODES)
async def test_a_worker_whose_name_cannot_be_looked_up_is_an_error(c, s, a, b, way):
    model = await deploy(c, Probe())
    with pytest.raises(OSError, match=r"not known|resolution|No address"):
        await ask(c, way, model, row(1), workers=["tcp://no-such-host.invalid:1"])
    assert np.array_equal(await ask(c, way, model, row(2)), row(4))


@every_way
@gen_cluster(client=True, nthreads=NODES)
async def test_a_request_waits_for_the_worker_it_is_bound_to(c, s, a, b, way):
    probe = Probe()
    model = await deploy(c, probe)
    bound = ask(c, way, model, row(1), workers=["tcp://127.0.0.1:9"])
    await queued(s, 1)
    # Others pass it meanwhile.
    assert np.array_equal(await model.submit(row(2)), [[4]])
    assert [args[0].item() for args, _ in probe.calls] == [2]
    problem = (await model.status()).problem
    assert "workers tcp://127.0.0.1:9, which no ready worker satisfies" in problem
    assert bound.status == "pending"


@every_way
@gen_cluster(client=True, nthreads=NODES)
async def test_allow_other_workers_is_a_preference_that_goes_through_the_queue(
    c, s, a, b, way
):
    probe = Probe()
    model = await deploy(c, probe)
    wish = {"workers": [b.address], "allow_other_workers": True}
    futures = [ask(c, way, model, row(i), **wish) for i in range(5)]
    await wait(futures)
    assert {(await daskinfer.info(f)).worker for f in futures} == {b.address}
    gone = {"workers": ["tcp://127.0.0.1:9"], "allow_other_workers": True}
    with running_late(probe):
        # Were the task not parked, Dask would run it as a task of its own.
        others = [ask(c, way, model, row(10 + i), **gone) for i in range(5)]
        await until(lambda: all(f.key in engine(s).requests for f in others))
    await wait(others)
    for future in others:
        assert (await daskinfer.info(future)).worker in {a.address, b.address}


@every_way
@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1, {"resources": {"GOOD": 2}}), ("127.0.0.1", 1)],
)
async def test_resources_must_be_declared(c, s, a, b, way):
    probe = Probe()
    model = await deploy(c, probe)
    futures = [ask(c, way, model, row(i), resources={"GOOD": 1}) for i in range(5)]
    await wait(futures)
    assert {(await daskinfer.info(f)).worker for f in futures} == {a.address}
    greedy = ask(c, way, model, row(9), resources={"GOOD": 3})
    await queued(s, 1)
    problem = (await model.status()).problem
    assert "resources GOOD=3" in problem
    assert f"GOOD: {a.address} has 2" in problem
    assert greedy.status == "pending"


@every_way
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_higher_priority_overtakes(c, s, a, way):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1)
    with running_late(probe):
        blocking = [model.submit(row(i)) for i in (0, 1)]
        await probe.entered()
        ordered = []
        for priority in (1, -1, 3, 2):
            before = waiting(s)
            ordered.append(ask(c, way, model, row(100 + priority), priority=priority))
            await queued(s, before + 1)
    await wait(blocking + ordered)
    values = [args[0].item() for args, _ in probe.calls]
    assert [v - 100 for v in values if v > 50] == [3, 2, 1, -1]


@every_way
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_retries_are_taken_and_then_it_fails(c, s, a, way):
    patient = await deploy(c, Probe(Flaky(2)), "patient")
    future = ask(c, way, patient, row(1), retries=2)
    assert np.array_equal(await future, [[1]])
    assert (await daskinfer.info(future)).attempts == 3
    hasty = await deploy(c, Probe(Flaky(2)), "hasty")
    with pytest.raises(OSError, match="not now"):
        await ask(c, way, hasty, row(1), retries=1)


@gen_cluster(client=True, nthreads=NODES)
async def test_pure_says_whether_equal_calls_are_one(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe)
    pure = [c.submit(model, ONE, pure=True) for _ in range(3)]
    await wait(pure)
    assert len({f.key for f in pure}) == 1
    assert sum(probe.rows) == 1
    impure = [c.submit(model, ONE, pure=False) for _ in range(3)]
    await wait(impure)
    assert len({f.key for f in impure}) == 3
    assert sum(probe.rows) == 4


@gen_cluster(client=True, nthreads=NODES)
async def test_an_actor_is_refused(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe)
    refused = [
        c.submit(model, ONE, actor=True),
        *c.map(model, [ONE, row(2)], actor=True),
        c.compute(dask.delayed(model)(ONE), actors=True),
        *futures_of(c.persist(dask.delayed(model)(row(2)), actors=True)),
    ]
    assert len({future.key for future in refused}) == 5
    for future in refused:
        with pytest.raises(NotServable, match="cannot be an actor"):
            await future
    assert probe.calls == []
    assert np.array_equal(await c.submit(model, row(2)), [[4]])


@gen_cluster(client=True, nthreads=NODES)
async def test_an_option_goes_before_an_annotation(c, s, a, b):
    model = await deploy(c, Probe())
    with dask.annotate(workers=[a.address], priority=7):
        future = model.options(workers=[b.address]).submit(ONE)
        await future
    assert (await daskinfer.info(future)).worker == b.address
    assert s.tasks[future.key].priority[0] == -7


@gen_cluster(client=True, nthreads=NODES)
async def test_annotations_may_depend_on_the_key(c, s, a, b):
    model = await deploy(c, Probe())
    with dask.annotate(priority=lambda key: len(key), allow_other_workers=True):
        future = model.options(key="four").submit(ONE)
        await future
    assert s.tasks["four"].priority[0] == -4


@gen_cluster(client=True, nthreads=NODES)
async def test_options_hold_for_every_request_of_a_map(c, s, a, b):
    model = await deploy(c, Probe())
    xs = [row(i) for i in range(6)]
    slow = c.map(model, xs, workers=[b.address], priority=3)
    fast = model.options(workers=[b.address], priority=3).map(xs)
    await wait(slow + fast)
    for future in slow + fast:
        assert (await daskinfer.info(future)).worker == b.address
        assert s.tasks[future.key].priority[0] == -3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": "high"}, TypeError),
        ({"priority": True}, TypeError),
        ({"retries": 1.5}, TypeError),
        ({"retries": -1}, ValueError),
        ({"allow_other_workers": True}, ValueError),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, error):
    with pytest.raises(error, match=next(iter(options))):
        Model("m").options(**options)
