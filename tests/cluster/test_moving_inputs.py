"""Inputs that are not where they should be when a worker looks for them."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Client, Future, Scheduler
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer.worker import runtime
from daskinfer.worker.inputs import fetch_inputs
from tests.cluster.helpers import Probe
from tests.cluster.scheduling_helpers import ONE, deploy


class Moving:
    """Lets inputs be missing so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
        self.times = times
        self.looked = 0
        monkeypatch.setattr(runtime, "fetch_inputs", self.fetch)

    async def fetch(self, worker: Any, who_has: Any) -> Any:
        if not who_has:
            return await fetch_inputs(worker, who_has)
        self.looked += 1
        if self.looked <= self.times:
            return {}, set(who_has)
        return await fetch_inputs(worker, who_has)


def ask(client: Client, model: Any, x: Future, fast: bool) -> Future:
    return model.submit(x) if fast else client.submit(model, x)


@pytest.mark.parametrize("fast", [True, False])
@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_found_at_the_last_attempt(
    client: Client,
    scheduler: Scheduler,
    a: Any,
    b: Any,
    fast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = Probe()
    model = await deploy(client, probe)
    moving = Moving(monkeypatch, times=4)
    future = ask(client, model, await client.scatter(ONE), fast)
    assert (await future == 2).all()
    assert moving.looked == (await daskinfer.info(future)).attempts == 5
    assert len(probe.calls) == 1


@pytest.mark.parametrize("fast", [True, False])
@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_never_found_and_then_retried_by_the_user(
    client: Client,
    scheduler: Scheduler,
    a: Any,
    b: Any,
    fast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = Probe()
    model = await deploy(client, probe)
    moving = Moving(monkeypatch, times=float("inf"))
    held = await client.scatter(ONE)
    future = ask(client, model, held, fast)
    with pytest.raises(RuntimeError, match=r"could not be fetched .* in 5 attempts"):
        await future
    assert moving.looked == 5
    assert probe.calls == []
    # A retry has as many attempts again.
    moving.looked, moving.times = 0, 4
    await future.retry()
    assert (await future == 2).all()
    assert moving.looked == 5
