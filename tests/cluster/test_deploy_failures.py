"""Models that do not get onto workers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, Worker
from distributed.utils_test import gen_cluster, inc

import daskinfer
from daskinfer import (
    DeploymentExists,
    DeploymentFailed,
    DeployTimeout,
    InferenceError,
)
from daskinfer.device import CpuDevice
from tests.cluster.helpers import FACTORY, Builder, Probe, linear

X = np.arange(8.0, dtype="float32").reshape(2, 4)


def build_with_wrong_weights() -> Any:
    net = linear(4, 3)
    net.load_state_dict(linear(4, 2).state_dict())
    return net


def expected(x: np.ndarray = X) -> np.ndarray:
    return linear()(torch.from_numpy(x)).detach().numpy()


@pytest.mark.parametrize(
    "factory, error, said",
    [
        ("no_such_package.nets:build", ModuleNotFoundError, "no_such_package"),
        (f"{__name__}:no_such_function", AttributeError, "no_such_function"),
        (f"{__name__}:build_with_wrong_weights", RuntimeError, "size mismatch"),
        ("builtins:int", TypeError, "returned a int, which cannot be called"),
    ],
)
@gen_cluster(client=True)
async def test_load_that_fails(
    client: Client,
    scheduler: Any,
    a: Any,
    b: Any,
    factory: str,
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said) as caught:
        await daskinfer.deploy(client, factory=factory, name="broken")
    # The worker's own frames are in the traceback.
    assert "_build" in {entry.name for entry in caught.traceback}
    assert await daskinfer.deployments(client) == []
    # Nothing is left behind, so that the next attempt can succeed.
    await daskinfer.deploy(client, linear(), name="broken")


@gen_cluster(client=True)
async def test_warmup_that_fails(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        await daskinfer.deploy(client, linear(), warmup=np.ones((1, 7), "float32"))
    with pytest.raises(ValueError, match=r"warmup= example .* has no rows"):
        await daskinfer.deploy(client, linear(), warmup=X[:0])
    assert await daskinfer.deployments(client) == []


@pytest.mark.parametrize("device", ["npu", "cuda"])
@gen_cluster(client=True)
async def test_no_such_device(
    client: Client, scheduler: Any, a: Any, b: Any, device: str
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(DeploymentFailed) as caught:
        await daskinfer.deploy(client, linear(), device=device)
    for worker in (a, b):
        assert f"{worker.address}: no {device} device: " in str(caught.value)
    assert await daskinfer.deployments(client) == []


@gen_cluster(client=True)
async def test_worker_without_torch(
    client: Client, scheduler: Any, a: Any, b: Any, monkeypatch: Any
) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(CpuDevice, "report", fail)
    for device in ("cpu", "auto"):
        with pytest.raises(InferenceError, match="No module named 'torch'"):
            await daskinfer.deploy(client, linear(), device=device)


@gen_cluster(client=True)
async def test_load_that_ends_the_process(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    with pytest.raises(InferenceError, match="would end its process: SystemExit"):
        await daskinfer.deploy(client, factory="sys:exit")
    assert await client.submit(inc, 1) == 2


@gen_cluster(client=True)
async def test_load_that_fails_on_one_worker(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    builder = Builder(failures=1)
    model = await daskinfer.deploy(
        client, factory=FACTORY, factory_kwargs={"builder": builder}
    )
    by_state = {w.state: w for w in (await model.status()).workers}
    assert set(by_state) == {"ready", "failed"}
    assert by_state["failed"].reason == "ArithmeticError('cannot build number 1')"
    assert not by_state["failed"].healthy
    futures = model.map([X] * 10)
    await client.gather(futures)
    answered = {(await daskinfer.info(future)).worker for future in futures}
    assert answered == {by_state["ready"].address}


@gen_cluster(client=True, nthreads=[])
async def test_timeout_without_workers(client: Client, scheduler: Any) -> None:
    with pytest.raises(DeployTimeout, match=r"within 0\.05 s: the cluster has no work"):
        await daskinfer.deploy(client, linear(), wait_timeout="50ms")
    # It stays, and goes on.
    (model,) = await daskinfer.deployments(client)
    async with Worker(scheduler.address):
        np.testing.assert_allclose(await model.submit(X), expected(), rtol=1e-6)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_timeout_while_loading(
    client: Client, scheduler: Any, worker: Any
) -> None:
    builder = Builder(is_open=False)
    with pytest.raises(DeployTimeout, match=f"{worker.address}: loading"):
        await daskinfer.deploy(
            client,
            factory=FACTORY,
            factory_kwargs={"builder": builder},
            wait_timeout=0.05,
        )
    builder.open()


@gen_cluster(client=True, nthreads=[("", 1, {"resources": {"GPU": 2}})])
async def test_timeout_names_the_missing_resource(
    client: Client, scheduler: Any, worker: Any
) -> None:
    with pytest.raises((DeployTimeout, DeploymentFailed)) as caught:
        await daskinfer.deploy(
            client, linear(), resources={"NPU": 1}, wait_timeout="50ms"
        )
    assert "needs NPU=1" in str(caught.value)
    assert f"{worker.address}: it lacks NPU=1 (it has GPU=2)" in str(caught.value)


@gen_cluster(client=True)
async def test_two_of_one_name(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, linear(), name="net")
    with pytest.raises(DeploymentExists, match=r"'net' is deployed .*undeploy\(\)"):
        await daskinfer.deploy(client, Probe(), name="net")
    # What was there still answers.
    np.testing.assert_allclose(await model.submit(X), expected(), rtol=1e-6)


@gen_cluster(client=True, nthreads=[])
async def test_two_of_one_name_at_once(client: Client, scheduler: Any) -> None:
    outcomes = await asyncio.gather(
        *(daskinfer.deploy(client, linear(), name="net", wait=False) for _ in range(5)),
        return_exceptions=True,
    )
    assert sum(isinstance(one, daskinfer.Model) for one in outcomes) == 1
    assert sum(isinstance(one, DeploymentExists) for one in outcomes) == 4
