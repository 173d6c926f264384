"""Bad input gets a clear answer, and harms nobody else."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, Worker
from distributed.utils_test import captured_logger, gen_cluster

import daskinfer
from daskinfer import BatchPolicy, Model, UnknownDeployment
from tests.cluster.helpers import Probe, linear, until
from tests.payload.structures import assert_same

X = np.arange(8.0, dtype="float32").reshape(2, 4)


# For the model


@pytest.mark.parametrize(
    "bad, said",
    [
        (np.ones((2, 5), "float32"), "shapes cannot be multiplied"),
        (np.ones((2, 4), "int64"), "dtype"),
        (np.ones((2, 4), "float64"), "dtype"),
        (torch.ones(2, 4, dtype=torch.bool), "dtype"),
        (np.array([["text"] * 4]), "dtype <U4 has no tensor equivalent"),
        (np.float32(3.0), "shapes cannot|must be Tensor|size of|dimension"),
        ([1, 2, 3], "must be Tensor, not list"),
        (None, "must be Tensor, not NoneType"),
    ],
    ids=["shape", "int64", "float64", "bool", "strings", "scalar", "list", "None"],
)
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_wrong_for_the_model(
    client: Client, scheduler: Any, worker: Any, bad: Any, said: str
) -> None:
    model = await daskinfer.deploy(client, linear())
    futures = [model.submit(X), model.submit(bad), model.submit(X)]
    futures.append(client.submit(model, bad))
    good, failed, also_good, also_failed = await asyncio.gather(
        *futures, return_exceptions=True
    )
    for answer in (good, also_good):
        assert_same(answer.shape, (2, 3))
    for error in (failed, also_failed):
        assert isinstance(error, (RuntimeError, TypeError)), error
        with pytest.raises(type(error), match=said):
            raise error
    status = await model.status()
    assert (status.successes, status.failures) == (2, 2)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_missing_and_unknown_arguments(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(client, linear())
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        await model.submit()
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        await model.submit(X, temperature=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'retries'") as no:
        await model.submit(X, retries=2)
    (note,) = no.value.__notes__
    assert "to set an option use model.options(retries=...)" in note
    assert (await model.submit(X)).shape == (2, 3)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_inputs_that_disagree_about_rows(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(client, lambda x, y: x + y, name="add")
    # Alone, as nobody can say how many rows it has; the model decides.
    assert_same(await model.submit(X, X[:1]), X + X[:1])
    with pytest.raises(ValueError, match="could not be broadcast"):
        await model.submit(X, np.ones((5, 4), "float32"))


# How many rows


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_no_rows(client: Client, scheduler: Any, worker: Any, warm: bool) -> None:
    model = await daskinfer.deploy(client, linear(), warmup=X if warm else None)
    empty = X[:0]
    for future in (model.submit(empty), client.submit(model, empty)):
        answer = await future
        assert (answer.shape, answer.dtype) == ((0, 3), np.float32)
    tensor = await model.submit(torch.from_numpy(empty))
    assert (tensor.shape, tensor.dtype) == ((0, 3), torch.float32)
    # In the same pass as others.
    answers = await client.gather(model.map([X, empty, X]))
    assert [len(answer) for answer in answers] == [2, 0, 2]


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_no_rows_where_the_model_refuses(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(client, lambda x: x / x.max(), name="scale")
    with pytest.raises(ValueError, match="zero-size array"):
        await model.submit(X[:0])
    assert_same(await model.submit(X), X / X.max())


@pytest.mark.parametrize("allowed", [None, [1, 4, 8]], ids=["any size", "sizes"])
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_more_rows_than_the_maximum(
    client: Client, scheduler: Any, worker: Any, allowed: list[int] | None
) -> None:
    probe = Probe(lambda x: {"double": x * 2, "names": ["row"] * len(x)})
    model = await daskinfer.deploy(
        client,
        probe,
        batching=BatchPolicy(max_batch_size=8, allowed_batch_sizes=allowed),
    )
    x = np.arange(101.0).reshape(101, 1)
    future = model.submit(x)
    assert_same(await future, {"double": x * 2, "names": ["row"] * 101})
    assert max(probe.rows) <= 8
    if allowed:
        assert set(probe.rows) <= set(allowed)
    assert (await daskinfer.info(future)).batch_size == 101
    by_graph = await client.submit(model, x)
    assert_same(by_graph["double"], x * 2)
    behind_a_future = await model.submit(client.submit(lambda: x))
    assert_same(behind_a_future["double"], x * 2)
    assert max(probe.rows) <= 8


# What is not there


@gen_cluster(client=True)
async def test_unknown_deployment(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    with pytest.raises(UnknownDeployment, match="named 'nope'; there is nothing"):
        await daskinfer.get(client, "nope")
    await daskinfer.deploy(client, Probe(), name="one")
    await daskinfer.deploy(client, Probe(), name="two")
    named = r"no deployment is named 'nope'; there is 'one', 'two'"
    nope = Model("nope")
    with pytest.raises(UnknownDeployment, match=named):
        await daskinfer.get(client, "nope")
    for call in (nope.status, nope.undeploy):
        with pytest.raises(UnknownDeployment, match=named):
            await call()
    for future in (nope.submit(X), client.submit(nope, X)):
        with pytest.raises(UnknownDeployment, match=named):
            await future
    with pytest.raises(UnknownDeployment, match=named):
        await nope.predict(X)
    with pytest.raises(UnknownDeployment, match=named):
        await client.submit(lambda model: model(X), nope)


@gen_cluster(client=True)
async def test_unknown_version(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    await daskinfer.deploy(client, Probe(), name="net", version="1")
    named = "'net' has no version '2'; it has '1'"
    with pytest.raises(UnknownDeployment, match=named):
        await daskinfer.get(client, "net", version="2")
    pinned = Model("net", "2")
    for future in (pinned.submit(X), client.submit(pinned, X)):
        with pytest.raises(UnknownDeployment, match=named):
            await future


@gen_cluster(client=True)
async def test_retry_after_the_deployment_came(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    await daskinfer.deploy(client, Probe(), name="other")
    early = Model("late").submit(X)
    with pytest.raises(UnknownDeployment):
        await early
    await daskinfer.deploy(client, Probe(), name="late")
    await client.retry([early])
    assert_same(await early, X * 2)


def test_handle_without_a_client() -> None:
    with pytest.raises(ValueError, match="No clients found"):
        Model("net").submit(X)


QUICK_WARNING = {"daskinfer.no-worker-warning": "20ms"}


@gen_cluster(
    client=True,
    nthreads=[("", 1, {"resources": {"GPU": 1}})],
    config=QUICK_WARNING,
)
async def test_no_worker_with_the_deployments_resource(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(
        client, Probe(), name="net", resources={"NPU": 1}, wait=False
    )
    with (
        captured_logger("distributed.inference.plugin") as log,
        warnings.catch_warnings(record=True) as shown,
    ):
        warnings.simplefilter("always")
        future = model.submit(X)
        await until(lambda: bool(shown))
    wanted = f"needs NPU=1; {worker.address}: it lacks NPU=1 (it has GPU=1)"
    told = f"1 request for 'net' is waiting: no worker is ready: {wanted}"
    # In the client's own process, and in the scheduler's log.
    assert told in str(shown[0].message)
    assert told in log.getvalue()
    assert wanted in ((await model.status()).problem or "")
    assert not future.done()
    async with Worker(scheduler.address, resources={"NPU": 1}) as npu:
        assert_same(await future, X * 2)
        assert (await daskinfer.info(future)).worker == npu.address
        assert (await model.status()).problem is None


@pytest.mark.parametrize("fast", [True, False])
@gen_cluster(
    client=True,
    nthreads=[("", 1, {"resources": {"NPU": 1}})],
    config=QUICK_WARNING,
)
async def test_no_worker_with_the_requests_resource(
    client: Client, scheduler: Any, worker: Any, fast: bool
) -> None:
    model = await daskinfer.deploy(client, Probe(), name="net")
    with captured_logger("distributed.inference.plugin") as log:
        if fast:
            future = model.options(resources={"NPU": 2}).submit(X)
        else:
            future = client.submit(model, X, resources={"NPU": 2})
        await until(lambda: "is waiting" in log.getvalue())
    problem = (await model.status()).problem
    assert problem == (
        "requests ask for resources NPU=2, which no ready worker satisfies; "
        f"NPU: {worker.address} has 1"
    )
    assert problem in log.getvalue()
    # Others are served meanwhile.
    assert_same(await model.submit(X), X * 2)
    assert not future.done()
    async with Worker(scheduler.address, resources={"NPU": 2}):
        assert_same(await future, X * 2)


@gen_cluster(client=True, nthreads=[], config=QUICK_WARNING)
async def test_no_worker_at_all(client: Client, scheduler: Any) -> None:
    model = await daskinfer.deploy(client, Probe(), name="net", wait=False)
    with captured_logger("distributed.inference.plugin") as log:
        future = model.submit(X)
        await until(lambda: "the cluster has no worker" in log.getvalue())
    async with Worker(scheduler.address):
        assert_same(await future, X * 2)


# For deploy


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({}, TypeError, "deploy one of"),
        ({"model": abs, "factory": "a:b"}, TypeError, "deploy one of"),
        ({"model": abs, "device": "tpu"}, ValueError, "device must be one of"),
        ({"model": 3}, TypeError, "cannot deploy a int, which cannot be called"),
        ({"model": torch.nn.Linear}, TypeError, "cannot deploy the class Linear"),
        ({"model": Model("net")}, TypeError, "is a handle, deployed already"),
        ({"model": abs, "factory_kwargs": {}}, TypeError, "needs factory="),
        ({"model": abs, "version": ""}, ValueError, "version must be a text"),
        ({"factory": "no colon"}, ValueError, "must look like 'package.module:f"),
        ({"path": "net.onnx"}, ValueError, "path must end in"),
        ({"path": "missing.pt2"}, FileNotFoundError, "no model file at"),
        ({"model": abs, "placement": "best"}, ValueError, "best"),
        ({"model": abs, "placement": "no.such.Class"}, ValueError, "no.such"),
        ({"model": abs, "resources": {"NPU": "many"}}, TypeError, "NPU"),
        ({"model": abs, "wait_timeout": "soon"}, (ValueError, KeyError), "soon"),
        ({"model": abs, "batching": {"max": 3}}, TypeError, "BatchPolicy"),
        ({"model": abs, "name": 3}, ValueError, "name must be a text"),
        ({"model": abs, "name": ""}, ValueError, "name must be a text"),
        ({"model": abs, "resources": {"NPU": 0}}, ValueError, "positive numbers"),
    ],
    ids=str,
)
@gen_cluster(client=True, nthreads=[])
async def test_arguments_of_deploy(
    client: Client, scheduler: Any, arguments: Any, error: Any, said: str
) -> None:
    with pytest.raises(error, match=said):
        await daskinfer.deploy(client, **arguments, wait=False)
    assert await daskinfer.deployments(client) == []


def test_deploy_without_a_client() -> None:
    with pytest.raises(TypeError, match=r"deploy takes a connected .*Client"):
        daskinfer.deploy(abs)  # type: ignore[arg-type]


@gen_cluster(client=True, nthreads=[])
async def test_what_cannot_be_pickled(client: Client, scheduler: Any) -> None:
    import threading

    net = linear()
    net.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"part \.lock .*cannot be pickled.*factory="):
        await daskinfer.deploy(client, net, wait=False)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"priority": "high"}, TypeError, "priority must be a number"),
        ({"retries": 1.5}, TypeError, "retries must be an int"),
        ({"priority": float("nan")}, ValueError, "priority must not be nan"),
        ({"priority": 2**70}, ValueError, "priority must not be beyond 64 bits"),
        ({"retries": -1}, ValueError, "retries must not be negative"),
        ({"retries": 2**70}, ValueError, "retries must not be beyond 64 bits"),
        ({"key": [1]}, TypeError, "key type"),
        ({"key": ""}, ValueError, "key must not be empty"),
        ({"key": ("x", "\ud800")}, ValueError, "key is no valid text"),
        ({"key": ("x", 2**70)}, ValueError, "key must not be beyond 64 bits"),
        ({"key": ("x", float("nan"))}, ValueError, "key must not be nan"),
        ({"workers": [None]}, TypeError, "workers must be addresses"),
        ({"workers": "\ud800"}, ValueError, "workers is no valid text"),
        ({"resources": {"NPU": float("inf")}}, ValueError, "resources must map names"),
        ({"allow_other_workers": True}, ValueError, "needs workers="),
        ({"resources": {"NPU": "one"}}, TypeError, "resources must map names"),
        ({"resources": ["NPU"]}, TypeError, "resources must map names"),
        ({"temperature": 1}, TypeError, "temperature"),
    ],
    ids=str,
)
def test_options(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Model("net").options(**options)


def test_one_key_for_many() -> None:
    with pytest.raises(ValueError, match="key= names one result"):
        Model("net").options(key="one").map([X, X])


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_the_models_exception_says_where_it_was_raised(
    client: Client, scheduler: Any, worker: Worker
) -> None:
    def refuse(x: np.ndarray) -> np.ndarray:
        raise ArithmeticError("not today")

    model = await daskinfer.deploy(client, refuse)
    for future in (model.submit(X), client.submit(model, X)):
        error = await future.exception()
        assert type(error) is ArithmeticError
        assert error.args == ("not today",)
        (note,) = error.__notes__
        assert note == (
            f"Raised in deployment 'refuse', version '1', on {worker.address}; "
            f"request {future.key!r}; input: ndarray float32 {X.shape}"
        )
        traceback = await future.traceback()
        frames = []
        while traceback is not None:
            frames.append(traceback.tb_frame.f_code.co_name)
            traceback = traceback.tb_next
        assert frames[-1] == "refuse"


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_an_option_that_the_model_takes_is_none_of_ours(
    client: Client, scheduler: Any, worker: Worker
) -> None:
    def refuse(x: np.ndarray, timeout: float) -> np.ndarray:
        raise TypeError(f"a timeout of {timeout} is of no use")

    model = await daskinfer.deploy(client, refuse)
    error = await model.submit(X, timeout=3).exception()
    (note,) = error.__notes__
    assert note.endswith("; input: ndarray float32 (2, 4), timeout=3")


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_an_exception_of_several_requests_names_none_of_them(
    client: Client, scheduler: Any, worker: Worker
) -> None:
    model = await daskinfer.deploy(
        client,
        lambda x: x[:1],
        name="m",
        batching=BatchPolicy(min_batch_size=3, max_wait="30s"),
    )
    futures = model.map([X[:1]] * 3)
    notes = {(await future.exception()).__notes__[0] for future in futures}
    assert notes == {
        f"Raised in deployment 'm', version '1', on {worker.address}; 3 requests"
    }
