"""Deployments, priorities and devices get their share."""

from __future__ import annotations

import numpy as np
from distributed import wait
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, queued

ONE_WORKER = [("127.0.0.1", 1)]


def row(value: float) -> np.ndarray:
    return np.full((1, 1), value)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_hot_deployment_does_not_starve_another(c, s, a):
    order = []
    hot = Probe(lambda x: order.append("hot") or x)
    other = Probe(lambda x: order.append("other") or x)
    hot_model = await deploy(c, hot, "hot", max_batch_size=1, warmup=ONE)
    other_model = await deploy(c, other, "other", max_batch_size=1, warmup=ONE)
    hot.close()
    crowd = hot_model.map([row(i) for i in range(200)])
    await hot.entered()
    few = other_model.map([row(i) for i in range(10)])
    await until(lambda: len(engine(s).requests) == 210)
    order.clear()
    hot.open()
    await wait(few)
    ahead = len(order)
    await wait(crowd)
    # They alternate by device time, so what waits for the few is a small part.
    assert ahead < 100


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_idle_deployment_holds_nothing_for_itself(c, s, a):
    first = await deploy(c, Probe(), "first")
    await deploy(c, Probe(), "idle")
    await wait(first.map([row(i) for i in range(50)]))
    assert (await first.status()).successes == 50


@gen_cluster(client=True, nthreads=ONE_WORKER, config={"daskinfer.priority-age": "1h"})
async def test_a_higher_priority_overtakes_all_that_wait(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    probe.close()
    usual = model.map([row(i) for i in range(20)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    urgent = model.options(priority=1).submit(row(99))
    await queued(s, 19)
    probe.open()
    await wait([urgent, *usual])
    values = [args[0].item() for args, _ in probe.calls]
    # Behind the two that had left already.
    assert values == [0, 1, 99, *range(2, 20)]


@gen_cluster(client=True, nthreads=ONE_WORKER, config={"daskinfer.priority-age": 0})
async def test_a_low_priority_is_not_held_for_ever(c, s, a):
    """Where a unit of priority is worth no wait at all, nobody is overtaken."""
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    probe.close()
    ahead = model.map([row(i) for i in range(2)])
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    low = model.options(priority=-5).submit(row(50))
    await queued(s, 1)
    later = model.options(priority=5).map([row(100 + i) for i in range(20)])
    await queued(s, 21)
    probe.open()
    await wait([*ahead, low, *later])
    values = [args[0].item() for args, _ in probe.calls]
    assert values == [0, 1, 50, *range(100, 120)]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_kinds_of_requests_take_turns_by_arrival(c, s, a):
    """A stream of one shape does not hold up a single one of another."""
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    probe.calls.clear()
    probe.close()
    ahead = model.map([row(i) for i in range(4)])
    await queued(s, 2)
    odd = model.submit(np.zeros((1, 2)))
    await queued(s, 3)
    later = model.map([row(10 + i) for i in range(20)])
    await queued(s, 23)
    probe.open()
    await wait([*ahead, odd, *later])
    shapes = [args[0].shape[1] for args, _ in probe.calls]
    assert shapes == [1, 1, 1, 1, 2, *[1] * 20]
