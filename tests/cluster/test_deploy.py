"""Getting models onto workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, Worker
from distributed.utils_test import captured_logger, gen_cluster, inc

import daskinfer
from daskinfer import (
    BatchPolicy,
    UnknownDeployment,
    protocol,
)
from tests.cluster.helpers import FACTORY, Builder, Probe, linear, until
from tests.payload.structures import assert_same

X = np.arange(8.0, dtype="float32").reshape(2, 4)


def expected(x: np.ndarray = X) -> np.ndarray:
    return linear()(torch.from_numpy(x)).detach().numpy()


# What can be deployed


@gen_cluster(client=True)
async def test_module(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, linear())
    assert (model.name, model.version, model.batch_dim) == ("Linear", None, 0)
    np.testing.assert_allclose(await model.submit(X), expected(), rtol=1e-6)


@gen_cluster(client=True)
async def test_function(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, np.negative)
    assert model.name == "negative"
    assert_same(await model.submit(X), -X)
    # Two lambdas are two models.
    plus, minus = [
        await daskinfer.deploy(client, f) for f in (lambda x: x + 1, lambda x: x - 1)
    ]
    assert plus != minus
    assert_same(await plus.submit(X), X + 1)
    assert_same(await minus.submit(X), X - 1)


@gen_cluster(client=True)
async def test_factory(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    builder = Builder()
    model = await daskinfer.deploy(
        client,
        factory=FACTORY,
        factory_kwargs={"builder": builder},
        name="built",
        version="2026-11",
    )
    assert model.name == "built"
    assert builder.built == 2  # once on each worker
    np.testing.assert_allclose(await model.submit(X), expected(), rtol=1e-6)
    status = await model.status()
    assert [version.version for version in status.versions] == ["2026-11"]


def write_export(path: Path) -> Path:
    batch = torch.export.Dim("batch", min=1)
    example = torch.ones(2, 4)
    program = torch.export.export(linear(), (example,), dynamic_shapes=({0: batch},))
    torch.export.save(program, path / "exported.pt2")
    return path / "exported.pt2"


def write_torchscript(path: Path) -> Path:
    torch.jit.save(torch.jit.trace(linear(), torch.ones(2, 4)), path / "traced.ts")
    return path / "traced.ts"


@pytest.mark.parametrize("write", [write_export, write_torchscript])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@gen_cluster(client=True)
async def test_path(
    client: Client, scheduler: Any, a: Any, b: Any, tmp_path: Path, write: Any
) -> None:
    path = write(tmp_path)
    model = await daskinfer.deploy(client, path=str(path))
    path.unlink()  # it has travelled
    assert model.name == path.stem
    for x in (X, X[:1], np.repeat(X, 5, axis=0)):
        np.testing.assert_allclose(await model.submit(x), expected(x), rtol=1e-5)


# How it travels


@gen_cluster(client=True)
async def test_weights_travel_once_to_each_worker(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    net = linear(1000, 500)  # 2 MB
    nbytes = 4 * 1000 * 500
    asked: list[str] = []
    await daskinfer.deploy(client, Probe(), name="first")
    answer = scheduler.handlers[protocol.ARTIFACT]

    async def counted(name: str, version: str) -> Any:
        asked.append(name)
        return await answer(name=name, version=version)

    scheduler.handlers[protocol.ARTIFACT] = counted
    model = await daskinfer.deploy(client, net)
    x = np.ones((1, 1000), "float32")
    await client.gather(model.map([x] * 30) + client.map(model, [x] * 30, pure=False))
    assert asked == ["Linear", "Linear"]
    streams = [client.scheduler_comm, *scheduler.stream_comms.values()]
    assert sum(stream.byte_count for stream in streams) < nbytes


@gen_cluster(client=True)
async def test_equal_models_have_equal_digests(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    nets = {"one": linear(), "same": linear(), "other": linear(seed=1)}
    digests = {}
    for name, net in nets.items():
        model = await daskinfer.deploy(client, net, name=name)
        (version,) = (await model.status()).versions
        digests[name] = version.digest
    assert digests["one"] == digests["same"] != digests["other"]


# When it arrives


@gen_cluster(client=True, nthreads=[])
async def test_empty_cluster(client: Client, scheduler: Any) -> None:
    model = await daskinfer.deploy(client, linear(), wait=False)
    assert (await model.status()).problem == "the cluster has no worker"
    futures = [model.submit(X), client.submit(model, X)]
    async with Worker(scheduler.address):
        for answer in await client.gather(futures):
            np.testing.assert_allclose(answer, expected(), rtol=1e-6)


@gen_cluster(client=True, nthreads=[])
async def test_deploy_waits_for_the_first_worker(
    client: Client, scheduler: Any
) -> None:
    waiting = asyncio.ensure_future(daskinfer.deploy(client, linear()))
    await until(lambda: protocol.STATUS in scheduler.handlers)
    assert not waiting.done()
    async with Worker(scheduler.address):
        model = await waiting
        np.testing.assert_allclose(await model.submit(X), expected(), rtol=1e-6)


@gen_cluster(client=True, nthreads=[], config={"daskinfer.no-worker-warning": "1ms"})
async def test_deploy_warns_once_that_there_is_no_worker(
    client: Client, scheduler: Any
) -> None:
    with captured_logger("distributed.inference.plugin") as log:
        waiting = asyncio.ensure_future(daskinfer.deploy(client, linear(), name="m"))
        await until(lambda: bool(log.getvalue()))
        async with Worker(scheduler.address):
            await waiting
    said = "'m' is waiting to be loaded: the cluster has no worker"
    assert log.getvalue().count(said) == 1


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_worker_that_joins_later(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(client, linear())
    async with Worker(scheduler.address) as late:

        async def ready() -> bool:
            workers = (await model.status()).workers
            return [w.state for w in workers] == ["ready", "ready"]

        while not await ready():
            await asyncio.sleep(0)
        # Pinned there, it can only be answered there.
        future = model.options(workers=[late.address]).submit(X)
        np.testing.assert_allclose(await future, expected(), rtol=1e-6)
        assert (await daskinfer.info(future)).worker == late.address


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_worker_is_responsive_while_it_loads(
    client: Client, scheduler: Any, worker: Any
) -> None:
    builder = Builder(is_open=False)
    model = await daskinfer.deploy(
        client,
        factory=FACTORY,
        factory_kwargs={"builder": builder},
        wait=False,
    )
    future = model.submit(X)
    await until(lambda: builder.built == 1)
    # Its event loop, its task threads and other deployments go on.
    assert await client.submit(inc, 1) == 2
    assert await client.run(lambda: "here") == {worker.address: "here"}
    (status,) = (await model.status()).workers
    assert (status.state, status.healthy) == ("loading", False)
    # A worker that joins has its plugins set up before the model is there.
    async with Worker(scheduler.address) as late:
        assert await client.submit(inc, 2, workers=[late.address]) == 3
        builder.open()
        np.testing.assert_allclose(await future, expected(), rtol=1e-6)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_warmup(client: Client, scheduler: Any, worker: Any) -> None:
    probe = Probe()
    model = await daskinfer.deploy(
        client, probe, warmup=X[:1], batching=BatchPolicy(max_batch_size=6)
    )
    # More than once each, as the first call of a size is no measurement.
    times = Counter(probe.rows)
    assert list(times) == [1, 2, 4, 6] and min(times.values()) > 1
    status = await model.status()
    (table,) = status.versions[0].latency.values()
    assert {rows for rows, _, _ in table} == {1, 2, 4, 6}
    assert (status.requests, status.batches) == (0, 0)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_warmup_of_allowed_sizes(
    client: Client, scheduler: Any, worker: Any
) -> None:
    probe = Probe(lambda x, y: x + y)
    await daskinfer.deploy(
        client,
        probe,
        warmup=(X, X),
        batching=BatchPolicy(allowed_batch_sizes=[1, 4, 16]),
    )
    assert list(Counter(probe.rows)) == [1, 4, 16]


# Afterwards


@gen_cluster(client=True)
async def test_get_and_list(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    assert await daskinfer.deployments(client) == []
    one = await daskinfer.deploy(client, Probe(), name="one")
    two = await daskinfer.deploy(
        client, Probe(), name="two", batching=BatchPolicy(batch_dim=None)
    )
    assert await daskinfer.deployments(client) == [one, two]
    found = await daskinfer.get(client, "two")
    assert (found, found.batch_dim) == (two, None)
    pinned = await daskinfer.get(client, "one", version="1")
    assert pinned.version == "1" and pinned != one
    assert_same(await pinned.submit(X), X * 2)
    async with Client(scheduler.address, asynchronous=True) as other:
        assert_same(await (await daskinfer.get(other, "one")).submit(X), X * 2)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_undeploy(client: Client, scheduler: Any, worker: Any) -> None:
    probe = Probe(is_open=False)
    model = await daskinfer.deploy(
        client, probe, name="net", batching=BatchPolicy(max_batch_size=2)
    )
    running = model.submit(X)
    await probe.entered()
    waiting = model.map([X] * 8)
    await until(lambda: len(scheduler.tasks) == 9)
    undeploying = asyncio.ensure_future(model.undeploy())
    await until(lambda: not scheduler.plugins["daskinfer"].registry.deployments)
    probe.open()
    await undeploying
    assert_same(await running, X * 2)
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(end, UnknownDeployment) for end in ended) >= 6
    with pytest.raises(UnknownDeployment, match="no deployment is named 'net'"):
        await model.submit(X)
    with pytest.raises(UnknownDeployment, match="there is nothing"):
        await model.undeploy()
    runtime = worker.plugins["daskinfer-runtime"]
    await until(lambda: not runtime.loader.models)
    again = await daskinfer.deploy(client, linear(), name="net")
    np.testing.assert_allclose(await again.submit(X), expected(), rtol=1e-6)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_undeploy_while_it_loads(
    client: Client, scheduler: Any, worker: Any
) -> None:
    builder = Builder(is_open=False)
    old = await daskinfer.deploy(
        client,
        factory=FACTORY,
        factory_kwargs={"builder": builder},
        name="net",
        wait=False,
    )
    waiting = old.submit(X)
    await until(lambda: builder.built == 1)
    await old.undeploy(wait_timeout=0)
    with pytest.raises(UnknownDeployment, match="undeployed before the request was"):
        await waiting
    # Another one of that name is not mistaken for it, nor kept from loading.
    deploying = asyncio.ensure_future(daskinfer.deploy(client, np.negative, name="net"))
    await until(lambda: "net" in scheduler.plugins["daskinfer"].registry.deployments)
    builder.open()
    assert_same(await (await deploying).submit(X), -X)
