"""What is undeployed or retired is gone from memory."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import Any

import numpy as np
import torch
from distributed.utils_test import captured_logger, gen_cluster

import daskinfer
from tests.cluster.helpers import FACTORY, Builder, Probe, linear, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left
from tests.cluster.version_helpers import Says, resident

ONE_WORKER = [("", 1)]
X = np.zeros((2, 4), np.float32)


def loaded(*workers: Any) -> list[weakref.ref[Any]]:
    """The models in the memory of workers."""
    return [
        weakref.ref(model.function)
        for worker in workers
        for model in worker.plugins["daskinfer-runtime"].loader.models.values()
    ]


@gen_cluster(client=True)
async def test_undeploy_returns_when_memory_is_free(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(c, linear(), warmup=X)
    await c.gather(model.map([X] * 20))
    found = loaded(a, b)
    assert [type(ref()) for ref in found] == [torch.nn.Linear] * 2
    await model.undeploy()
    assert [ref() for ref in found] == [None, None]
    assert not len(engine(s).unloading)


def with_cycle() -> Any:
    net = linear()
    net.itself = [net]  # type: ignore[assignment]
    return net


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_model_that_holds_itself_is_freed_too(c: Any, s: Any, a: Any) -> None:
    model = await daskinfer.deploy(c, factory=f"{__name__}:with_cycle")
    await model.submit(X)
    (ref,) = loaded(a)
    await model.undeploy()
    assert ref() is None


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_undeploy_waits_for_batches_that_run(c: Any, s: Any, a: Any) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe)
    running = model.submit(ONE)
    await probe.entered()
    undeploying = asyncio.ensure_future(model.undeploy())
    await until(lambda: not engine(s).registry.deployments)
    assert len(engine(s).unloading) == 1 and not undeploying.done()
    probe.open()
    await undeploying
    assert (await running)[0, 0] == 2
    assert not len(engine(s).unloading)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_undeploy_says_who_takes_too_long(c: Any, s: Any, a: Any) -> None:
    builder = Builder(is_open=False)
    model = await daskinfer.deploy(
        c, factory=FACTORY, factory_kwargs={"builder": builder}, wait=False
    )
    await until(lambda: builder.built == 1)
    with captured_logger("distributed.inference.client", logging.WARNING) as log:
        await model.undeploy(wait_timeout="10ms")
    assert f"{a.address} had not freed its memory after 0.01 s" in log.getvalue()
    builder.open()
    await until(lambda: not len(engine(s).unloading))
    assert resident(a) == [set()]


@gen_cluster(client=True)
async def test_undeploy_does_not_wait_for_workers_that_leave(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe)
    running = model.submit(ONE)
    await probe.entered()
    undeploying = asyncio.ensure_future(model.undeploy())
    await until(lambda: len(engine(s).unloading) == 1)
    probe.open()
    for worker in (a, b):
        await worker.close()
    await undeploying
    del running


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_retired_versions_are_freed(c: Any, s: Any, a: Any) -> None:
    model = await daskinfer.deploy(c, linear(), name="m")
    (first,) = loaded(a)
    await model.update(linear(seed=1), version="2")
    assert first() is not None
    await model.update(linear(seed=2), version="3")
    await until(lambda: not len(engine(s).unloading))
    assert first() is None
    assert len(loaded(a)) == 2


@gen_cluster(client=True)
async def test_nothing_is_left_of_what_was_deployed_updated_and_undeployed(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    for round_ in range(5):
        model = await deploy(c, Says(1))
        for version in "23":
            await model.update(Says(int(version)), version=version)
        await model.update(Says(4), version="4", traffic=0.5)
        answers = await c.gather(model.map([ONE] * 20))
        assert {x[0, 0] for x in answers} <= {3, 4}
        await model.undeploy()
        plugin = engine(s)
        assert tables(plugin) == dict.fromkeys(tables(plugin), 0), round_
        for worker in (a, b):
            loader = worker.plugins["daskinfer-runtime"].loader
            assert not loader.models and not loader.active and not loader._loading
    del answers
    await nothing_is_left(s, a, b)


def tables(plugin: Any) -> dict[str, int]:
    """Sizes of what the engine knows of deployments."""
    return {
        "deployments": len(plugin.registry.deployments),
        "lines": len(plugin.dispatcher.lines),
        "statistics": len(plugin.dispatcher.statistics),
        "devices": sum(len(line.devices) for line in plugin.dispatcher.lines.values()),
        "routes": len(plugin.routing.edition.routes),
        "unloading": len(plugin.unloading),
        "trials": len(plugin.versions._trials),
        "policies": len(plugin.versions._policies),
        "draining": len(plugin.versions._draining),
    }
