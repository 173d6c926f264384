"""Clients that come at the same moment, and messages that no connection can carry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

import daskinfer
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, engine


@gen_cluster(nthreads=[("", 1)], timeout=60)
async def test_clients_that_deploy_first_at_the_same_moment(
    scheduler: Scheduler, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = scheduler.register_worker_plugin
    clients_came = asyncio.Event()

    async def held(*args: Any, **kwargs: Any) -> Any:
        # As a worker with a busy event loop answers late.
        await clients_came.wait()
        return await register(*args, **kwargs)

    monkeypatch.setattr(scheduler, "register_worker_plugin", held)
    async with (
        Client(scheduler.address, asynchronous=True) as one,
        Client(scheduler.address, asynchronous=True) as other,
    ):
        first = asyncio.ensure_future(daskinfer.deploy(one, Probe(), name="first"))
        second = asyncio.ensure_future(daskinfer.deploy(other, Probe(), name="second"))
        # The second needs nothing that is held: it comes through while the first waits.
        await until(lambda: "second" in _deployed(scheduler))
        clients_came.set()
        for model in await asyncio.gather(first, second):
            assert (await model.submit(ONE) == 2).all()
    assert scheduler.stream_handlers["daskinfer-submit"].__self__ is engine(scheduler)


def _deployed(scheduler: Scheduler) -> set[str]:
    if "daskinfer" not in scheduler.plugins:
        return set()
    return {deployment.name for deployment in engine(scheduler).registry}


@gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
async def test_names_that_no_message_can_carry(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    for name in ({"name": "\ud800"}, {"name": "m", "version": "\ud800"}):
        with pytest.raises(ValueError, match="is no valid text"):
            daskinfer.deploy(client, Probe(), **name)
    assert client.status == "running"
