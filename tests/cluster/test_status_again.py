"""The counts of a name that was undeployed and deployed again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Client, Scheduler, wait
from distributed.utils_test import gen_cluster

import daskinfer
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine


def fail(x: Any) -> Any:
    raise ArithmeticError("it always fails")


@pytest.mark.parametrize("function", [lambda x: x * 2, fail], ids=["answer", "fail"])
@gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
async def test_what_ends_late_does_not_count_for_the_next(
    client: Client, scheduler: Scheduler, worker: Any, function: Any
) -> None:
    probe = Probe(function, is_open=False)
    old = await deploy(client, probe)
    late = old.submit(ONE)
    cancelled = old.submit(ONE)
    await probe.entered()
    await until(lambda: cancelled.key in scheduler.tasks)
    await old.undeploy(wait_timeout=0)
    deploying = asyncio.ensure_future(deploy(client, Probe()))
    await until(lambda: "m" in engine(scheduler).registry.deployments)
    probe.open()
    await wait([late, cancelled])
    new = await deploying
    status = await new.status()
    assert (status.requests, status.successes, status.failures) == (0, 0, 0)
    assert (status.cancelled, status.batches, status.rows) == (0, 0, 0)
    assert [(w.batches, w.rows) for w in status.workers] == [(0, 0)]
    assert (await new.submit(ONE) == 2).all()
    status = await new.status()
    assert (status.requests, status.successes, status.rows) == (1, 1, 1)


@gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
async def test_what_the_next_serves_counts_for_it(
    client: Client, scheduler: Scheduler, worker: Any
) -> None:
    gate = Probe(is_open=False)
    maker = await daskinfer.deploy(client, gate, name="maker")
    old = await deploy(client, Probe())
    # Its input is not there yet: it waits for that, and not for the deployment.
    request = old.submit(maker.submit(ONE))
    await gate.entered()
    await until(lambda: request.key in scheduler.tasks)
    await old.undeploy()
    new = await deploy(client, Probe(lambda x: x * 3))
    gate.open()
    assert (await request == 6).all()
    status = await new.status()
    assert (status.requests, status.successes, status.rows) == (1, 1, 1)
