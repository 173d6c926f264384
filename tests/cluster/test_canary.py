"""A version that answers a share of the requests, to see how it does."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from distributed.utils_test import captured_logger, gen_cluster

from daskinfer import AbortPolicy, NoUpdate, UnknownDeployment, VersionExists
from scheduler_plugins.deployment import ReplicaState
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine
from tests.cluster.version_helpers import (
    Says,
    active,
    resident,
    version_now,
    versions_of,
)


def refuse(x: Any) -> Any:
    raise ArithmeticError("the new one is broken")


@gen_cluster(client=True)
async def test_a_share_of_the_requests_by_their_keys(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    model = await deploy(c, Says(1))
    await model.update(Says(2), version="2", traffic=0.25)
    assert active(s) == "1"
    keys = [f"user-{number}" for number in range(200)]
    rounds = []
    for _ in range(2):
        futures = [model.options(key=key).submit(ONE) for key in keys]
        answers = await c.gather(futures)
        told = await versions_of(futures)
        assert [x[0, 0] for x in answers] == [float(version) for version in told]
        rounds.append(told)
        del futures
        await until(lambda: not s.tasks)
    assert rounds[0] == rounds[1]
    canaries = rounds[0].count("2")
    assert 25 <= canaries <= 75
    # Dask's own calls have the same keys, and the same answers.
    futures = [c.submit(model, ONE, key=key) for key in keys]
    await c.gather(futures)
    assert await versions_of(futures) == rounds[0]
    status = await model.status()
    canary, stable = status.version("2"), status.version("1")
    assert (canary.stage, canary.share, canary.active) == ("canary", 0.25, False)
    assert (canary.requests, stable.requests) == (3 * canaries, 3 * (200 - canaries))
    assert canary.failures == 0 and canary.response.p50 > 0
    await model.traffic({"2": 1.0})
    assert [await version_now(model) for _ in range(5)] == ["2"] * 5
    await model.traffic({"2": 0})
    assert [await version_now(model) for _ in range(5)] == ["1"] * 5
    await model.promote("2")
    assert await version_now(model) == "2"
    assert (await model.status()).version("2").share == 0.0
    with pytest.raises(NoUpdate, match="no version '1' to send traffic to"):
        await model.traffic({"1": 0.5})
    with pytest.raises(UnknownDeployment, match="no version '7'"):
        await model.traffic({"7": 0.5})


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_canary_that_is_given_up(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Says(1), max_batch_size=1)
    new = Probe(lambda x: x + 1)
    await model.update(new, version="2", traffic=1.0)
    new.close()
    futures = model.map([ONE] * 6)
    await new.entered()
    await model.abort()
    # What waits for it moves back, and what it runs it answers.
    assert (await model.status()).version("2").stage == "draining"
    new.open()
    await c.gather(futures)
    told = await versions_of(futures)
    assert told[0] == "2" and told.count("1") >= 4
    await until(lambda: resident(a) == [{"1"}])
    assert [v.version for v in (await model.status()).versions] == ["1"]
    with pytest.raises(VersionExists, match="'m' had a version '2'"):
        await model.update(Says(2), version="2")


@gen_cluster(client=True)
async def test_a_canary_that_fails_is_given_up_by_itself(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    model = await deploy(c, Says(1))
    policy = AbortPolicy(max_error_rate=0.1, min_requests=10)
    await model.update(refuse, version="2", traffic=0.3, auto_abort=policy)
    failed = 0
    with captured_logger("distributed.inference.plugin") as log:
        while engine(s).registry.deployment("m").update is not None:
            ended = await asyncio.gather(*model.map([ONE] * 4), return_exceptions=True)
            failed += sum(isinstance(end, ArithmeticError) for end in ended)
    assert 10 <= failed <= 40
    status = await model.status()
    assert "version '2' of 'm' was given up: " in log.getvalue()
    assert "requests failed, and 0 of" in str(status.last_update)
    assert [await version_now(model) for _ in range(20)] == ["1"] * 20
    await until(lambda: resident(a, b) == [{"1"}] * 2)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_canary_that_is_slow_is_given_up_by_itself(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, Says(1))

    def slow(x: Any) -> Any:
        total = 0
        for _ in range(400_000):
            total += 1
        return x + total

    policy = AbortPolicy(max_latency_ratio=2, min_requests=10)
    await model.update(slow, version="2", traffic=0.5, auto_abort=policy)
    for _ in range(400):
        await model.submit(np.ones((1, 1)))
        if engine(s).registry.deployment("m").update is None:
            break
    assert "its median latency is" in str((await model.status()).last_update)
    assert await version_now(model) == "1"


@gen_cluster(client=True)
async def test_the_last_worker_of_a_canary_dies(c: Any, s: Any, a: Any, b: Any) -> None:
    """Its share is answered by the active version until another worker has it."""
    model = await deploy(c, Says(1))
    await model.update(Says(2), version="2", traffic=1.0, min_ready=0.5)
    registry = engine(s).registry
    await until(lambda: len(registry.version("m", "2").ready()) == 2)
    assert await version_now(model) == "2"
    registry.version("m", "2").replicas[b.address].state = ReplicaState.FAILED
    engine(s).dispatcher.lines["m", "2"].devices.pop(b.address)
    await a.close()
    assert await version_now(model) == "1"
