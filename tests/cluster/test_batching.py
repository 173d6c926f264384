"""Which requests share a forward pass, and when a batch leaves."""

from __future__ import annotations

import asyncio
import math
import random
import time

import numpy as np
import pytest
from distributed import Event, wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import OutputMismatch
from scheduler_plugins import settling
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, queued

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = ONE_WORKER * 2


def rows(count: int, value: float = 0.0, columns: int = 1) -> np.ndarray:
    return np.full((count, columns), value)


async def held_back(scheduler, count):
    """Wait until so many requests are held and the batcher has set its alarm."""
    await queued(scheduler, count)
    await until(lambda: engine(scheduler).dispatcher._timer.at < math.inf)


class Constant:
    """A model whose passes take the same time at every size."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, x):
        time.sleep(self.seconds)
        return x


@pytest.mark.parametrize("way", ["client.map", "model.map"])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_requests_that_cost_no_more_together_are_one_batch(c, s, a, way):
    probe = Probe(Constant(0.1))
    model = await deploy(c, probe, max_batch_size=256, warmup=ONE)
    probe.calls.clear()
    xs = [rows(1, i) for i in range(140)]
    futures = c.map(model, xs) if way == "client.map" else model.map(xs)
    await wait(futures)
    assert probe.rows == [140]
    assert (await daskinfer.info(futures[0])).batch_size == 140


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_wait_counts_from_the_first_arrival_and_ends_with_enough(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, min_batch_size=4, max_wait="1h", warmup=ONE)
    probe.calls.clear()
    for spell in range(3):
        # After an idle spell the first one waits for company again.
        futures = [model.submit(rows(1, spell))]
        await held_back(s, 1)
        dispatcher = engine(s).dispatcher
        alarm = dispatcher._timer.at
        futures.append(model.submit(rows(1, spell)))
        await held_back(s, 2)
        # A later arrival does not put the end off.
        assert dispatcher._timer.at == pytest.approx(alarm, abs=1e-3)
        assert len(probe.calls) == spell
        futures += model.map([rows(1, spell)] * 2)
        await wait(futures)
        assert probe.rows == [4] * (spell + 1)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_wait_goes_by_a_clock_that_nobody_sets(c, s, a, monkeypatch):
    probe = Probe()
    model = await deploy(c, probe, min_batch_size=4, max_wait="1h", warmup=ONE)
    probe.calls.clear()
    futures = [model.submit(ONE)]
    await held_back(s, 1)
    alarm = engine(s).dispatcher._timer.at
    # Somebody sets the host's clock, a day forwards.
    real = settling.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    monkeypatch.setattr(settling, "time", lambda: real() + 86_400)
    futures.append(model.submit(ONE))
    await held_back(s, 2)
    assert engine(s).dispatcher._timer.at == pytest.approx(alarm, abs=1e-3)
    assert probe.calls == []
    monkeypatch.undo()
    futures += model.map([ONE] * 2)
    await wait(futures)
    assert probe.rows == [4]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_wait_ends_without_company(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, min_batch_size=4, max_wait="50ms", warmup=ONE)
    probe.calls.clear()
    assert np.array_equal(await model.submit(rows(1, 3)), rows(1, 6))
    assert probe.rows == [1]


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_full_batches_go_at_once_to_all_workers(c, s, a, b):
    probe = Probe()
    model = await deploy(
        c, probe, min_batch_size=8, max_batch_size=8, max_wait="1h", warmup=ONE
    )
    probe.calls.clear()
    probe.close()
    futures = model.map([rows(1, i) for i in range(32)])
    # Both devices run one while others wait: nothing makes them take turns.
    await probe.entered(2)
    assert {w.in_flight > 0 for w in (await model.status()).workers} == {True}
    probe.open()
    await wait(futures)
    assert probe.rows == [8] * 4


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_no_pass_is_above_the_maximum_counted_in_rows(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=8)
    draw = random.Random(0)
    xs = [rows(draw.choice([0, 1, 2, 3, 5, 8, 13, 40]), i) for i in range(150)]
    futures = model.map(xs)
    for x, y in zip(xs, await daskinfer.gather(futures), strict=True):
        assert np.array_equal(y, 2 * x)
    assert max(probe.rows) == 8
    assert sum(probe.rows) == sum(len(x) for x in xs)
    status = await model.status()
    assert status.rows == sum(probe.rows)


@pytest.mark.parametrize("returned", [slice(1, None), slice(None, None)])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_wrong_number_of_outputs_fails_that_batch_only(c, s, a, returned):
    def careless(x):
        out = list(x)[returned]
        return [*out, *out[:1]] if len(out) == len(x) else out

    state = {"careless": True}
    probe = Probe(lambda x: careless(x) if state["careless"] else list(x))
    model = await deploy(c, probe)
    futures = model.map([["a", "b"], ["c"], ["d", "e"]])
    for future in futures:
        with pytest.raises(OutputMismatch):
            await future
    state["careless"] = False
    assert await model.submit(["x", "y"]) == ["x", "y"]


class Shy:
    """Cannot be compared by value."""

    def __reduce__(self):
        raise TypeError("leave me alone")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_input_whose_own_code_fails_while_it_is_sized_fails_alone(c, s, a):
    probe = Probe(lambda x, mode=None: x * 2, is_open=False)
    model = await deploy(c, probe)
    # The scheduler cannot see inside futures; the worker sizes such inputs.
    shy, fine = c.submit(Shy), c.submit(str, "mode")
    bad = model.submit(rows(1, 1), mode=shy)
    good = [model.submit(rows(1, i), mode=fine) for i in range(3)]
    probe.open()
    with pytest.raises(TypeError, match="leave me alone"):
        await bad
    for i, future in enumerate(good):
        assert np.array_equal(await future, rows(1, 2 * i))
    with pytest.raises(TypeError, match="leave me alone"):
        model.submit(rows(1), mode=Shy())
    assert np.array_equal(await model.submit(rows(1, 1)), rows(1, 2))


@pytest.mark.parametrize("way", ["client.submit", "model.submit", "futures"])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_different_requests_never_share_a_pass(c, s, a, way):
    probe = Probe(lambda x, flag=None: x)
    model = await deploy(c, probe, warmup=ONE)
    probe.calls.clear()
    probe.close()
    first = model.submit(ONE)
    await probe.entered()

    def ask(x, **kwargs):
        if way == "client.submit":
            return c.submit(model, x, **kwargs, pure=False)
        if way == "futures":
            x = c.submit(np.copy, x, pure=False)
        return model.submit(x, **kwargs)

    kinds = [
        (rows(1), {}),
        (rows(1), {"flag": 1}),
        (rows(1), {"flag": 1.0}),
        (rows(1), {"flag": "1"}),
        (rows(1).astype("float32"), {}),
        (rows(1, columns=2), {}),
    ]
    futures = [ask(x, **kwargs) for _ in range(4) for x, kwargs in kinds]
    await until(lambda: len(engine(s).requests) == 1 + len(futures))
    probe.open()
    await wait([first, *futures])
    seen = [
        (args[0].dtype.str, args[0].shape[1:], repr(kwargs))
        for args, kwargs in probe.calls[1:]
    ]
    assert len(set(seen)) == len(kinds)
    assert sum(probe.rows[1:]) == len(futures)
    # Those of one kind do share.
    assert len(seen) < len(futures)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_model_sees_allowed_sizes_only(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, allowed_batch_sizes=[1, 4, 16], warmup=ONE)
    assert set(probe.rows) == {1, 4, 16}
    probe.calls.clear()
    for count in (1, 2, 3, 5, 16, 17, 40):
        y = await model.submit(rows(count, count))
        assert np.array_equal(y, rows(count, 2 * count))
    futures = model.map([rows(1, i) for i in range(50)])
    for i, y in enumerate(await daskinfer.gather(futures)):
        assert np.array_equal(y, rows(1, 2 * i))
    assert set(probe.rows) <= {1, 4, 16}
    status = await model.status()
    asked = 1 + 2 + 3 + 5 + 16 + 17 + 40 + 50
    assert status.rows == asked
    assert status.padded_rows == sum(probe.rows) - asked > 0


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_on_results_of_other_tasks_batch_together(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    gate = await Event("ready")

    async def late(i):
        await Event("ready").wait()
        return np.full((1, 1), i)

    inputs = [c.submit(late, i, pure=False) for i in range(20)]
    futures = [model.submit(x) for x in inputs]
    probe.calls.clear()
    probe.close()
    blocking = model.map([ONE] * 2)
    await probe.entered()
    await gate.set()
    await wait(inputs)
    probe.open()
    await wait(futures + blocking)
    for i, y in enumerate(await daskinfer.gather(futures)):
        assert np.array_equal(y, rows(1, 2 * i))
    assert max(probe.rows) > 1
    assert len(probe.calls) < 22


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_leave_after_what_makes_their_inputs(c, s, a, b):
    """However calls of all kinds follow each other without a pause."""
    double = await deploy(c, Probe(), "double")
    increase = await deploy(c, Probe(lambda x: x + 1), "increase")
    futures = []
    for i in range(20):
        task = c.submit(np.full, (1, 1), i, pure=False)
        chained = increase.submit(double.submit(task))
        futures.append(double.submit(c.submit(np.negative, chained, pure=False)))
        del task, chained
    for i, y in enumerate(await daskinfer.gather(futures)):
        assert np.array_equal(y, rows(1, -2 * (2 * i + 1)))


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_that_come_one_by_one_are_answered_one_by_one(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.calls.clear()
    for i in range(20):
        assert np.array_equal(await model.submit(rows(1, i)), rows(1, 2 * i))
    assert probe.rows == [1] * 20


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_waits_while_the_device_is_busy_leaves_together(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.calls.clear()
    probe.close()
    first = model.submit(ONE)
    await probe.entered()
    later = []
    for i in range(10):
        later.append(model.submit(rows(1, i)))
        await asyncio.sleep(0)
    await until(lambda: len(engine(s).requests) == 11)
    probe.open()
    await wait([first, *later])
    # One may have been sent ahead, to be there when the device is free.
    assert len(probe.calls) <= 4
