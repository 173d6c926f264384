"""Every way to call a deployed model, but for Dask's collections."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import dask
import numpy as np
import pytest
import torch
from distributed import Client, get_worker
from distributed.utils_test import gen_cluster, inc

import daskinfer
from tests.cluster.helpers import PATIENCE, Local, Probe

#: The calls into Dask's inner workings, also on its oldest supported release.
pytestmark = pytest.mark.smoke


def double(x: Any) -> Any:
    return x * 2


X = np.arange(6.0).reshape(3, 2)


async def by_submit(client: Client, model: Any) -> Any:
    return await client.submit(model, X)


async def by_map(client: Client, model: Any) -> Any:
    futures = client.map(model, [X[:1], X[1:]])
    return np.concatenate(await client.gather(futures))


async def by_delayed(client: Client, model: Any) -> Any:
    return await client.compute(dask.delayed(model)(X))


async def by_fast_submit(client: Client, model: Any) -> Any:
    return await model.submit(X)


async def by_fast_map(client: Client, model: Any) -> Any:
    return np.concatenate(await daskinfer.gather(model.map([X[:1], X[1:]])))


async def by_options(client: Client, model: Any) -> Any:
    return await model.options(priority=3, retries=1).submit(X)


async def by_options_map(client: Client, model: Any) -> Any:
    futures = model.options(priority=3).map([X[:1], X[1:]])
    return np.concatenate(await client.gather(futures))


async def by_call(client: Client, model: Any) -> Any:
    return await model(X)


async def by_call_with_options(client: Client, model: Any) -> Any:
    return await model.options(priority=3)(X)


async def by_a_task(client: Client, model: Any) -> Any:
    return await client.submit(lambda m: m(X), model)


@pytest.mark.parametrize(
    "call",
    [
        by_submit,
        by_map,
        by_delayed,
        by_fast_submit,
        by_fast_map,
        by_options,
        by_options_map,
        by_call,
        by_call_with_options,
        by_a_task,
    ],
)
@gen_cluster(client=True)
async def test_asynchronous(
    client: Client, scheduler: Any, a: Any, b: Any, call: Any
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe)
    np.testing.assert_array_equal(await call(client, model), X * 2)
    assert sum(probe.rows) == 3
    assert (await model.status()).successes in (1, 2)


@gen_cluster(client=True, nthreads=[("", 1), ("", 1)])
async def test_inside_tasks_that_take_all_threads(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, double)
    barrier = Barrier(parties=2)

    def task(model: Any, i: int, barrier: Barrier) -> Any:
        barrier.wait()  # every thread of the cluster is in such a task
        return model(X + i)

    futures = client.map(task, [model] * 2, range(2), barrier=barrier, pure=False)
    for i, answer in enumerate(await client.gather(futures)):
        np.testing.assert_array_equal(answer, (X + i) * 2)


class Barrier(Local):
    """A barrier that tasks in this process share."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties, timeout=PATIENCE)

    def wait(self) -> None:
        self._barrier.wait()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_recursive_tasks(client: Client, scheduler: Any, worker: Any) -> None:
    model = await daskinfer.deploy(client, double)
    outer = await daskinfer.deploy(client, lambda x: x + 1, name="outer")

    def task(model: Any, outer: Any) -> Any:
        future = model.submit(X)
        return outer(future.result())

    answer = await client.submit(task, model, outer)
    np.testing.assert_array_equal(answer, X * 2 + 1)


@gen_cluster(client=True)
async def test_inputs_that_are_futures(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, double)
    (scattered,) = await client.scatter([X])
    made = client.submit(inc, X)
    chained = model.submit(model.submit(made))
    np.testing.assert_array_equal(await model.submit(scattered), X * 2)
    np.testing.assert_array_equal(await client.submit(model, scattered), X * 2)
    np.testing.assert_array_equal(await chained, (X + 1) * 4)
    again = client.submit(inc, client.submit(model, model.submit(scattered)))
    np.testing.assert_array_equal(await again, X * 4 + 1)


@gen_cluster(client=True)
async def test_futures_inside_containers_and_keywords(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    def add(pair: dict[str, Any], *, bias: Any) -> Any:
        return pair["x"] + pair["ys"][0] + bias

    model = await daskinfer.deploy(client, add)
    x, y, bias = (client.submit(inc, X + i, pure=False) for i in range(3))
    for call in (model.submit, lambda *a, **k: client.submit(model, *a, **k)):
        answer = await call({"x": x, "ys": (y,)}, bias=bias)
        np.testing.assert_array_equal(answer, X * 3 + 6)


@gen_cluster(client=True)
async def test_inputs_that_are_keys_of_tasks(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    """A text that equals the key of a task is a text."""
    model = await daskinfer.deploy(
        client, lambda texts: [t.upper() for t in texts], name="upper"
    )
    future = client.submit(inc, 1, key="a-key")
    await future
    assert await model.submit(["a-key"]) == ["A-KEY"]
    assert await client.submit(model, ["a-key"]) == ["A-KEY"]


@gen_cluster(client=True)
async def test_input_that_failed(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, double)
    failed = client.submit(lambda: 1 / 0)
    for future in (model.submit(failed), client.submit(model, failed)):
        with pytest.raises(ZeroDivisionError):
            await future
    await client.gather([failed], errors="skip")
    with pytest.raises(ZeroDivisionError):
        await model.submit(failed)
    assert (await model.submit(X) == X * 2).all()


@gen_cluster(client=True)
async def test_current_worker_inside_a_model(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(
        client, lambda xs: [get_worker().address] * len(xs), name="where"
    )
    future = model.submit(["x"])
    assert await future == [(await daskinfer.info(future)).worker]


@gen_cluster(client=True, nthreads=[("", 2)])
async def test_passes_run_in_inference_mode_on_the_devices_own_thread(
    client: Client, scheduler: Any, worker: Any
) -> None:
    def where(xs: list[str]) -> list[tuple[bool, int]]:
        return [(torch.is_inference_mode_enabled(), threading.get_ident())] * len(xs)

    models = [
        await daskinfer.deploy(client, Probe(where), name=name) for name in ("a", "b")
    ]
    futures = [model.submit([str(i)]) for i in range(10) for model in models]
    seen = {answer for answers in await client.gather(futures) for answer in answers}
    ((inference, thread),) = seen
    assert inference
    # Neither the event loop's nor one that runs tasks.
    assert thread != threading.get_ident()
    tasks = [client.submit(threading.get_ident, pure=False) for _ in range(20)]
    assert thread not in await client.gather(tasks)


@gen_cluster(client=True)
async def test_many_requests_in_order(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, double)
    inputs = [np.full((1, 2), i) for i in range(500)]
    answers = await client.gather(model.map(inputs))
    assert [int(answer[0, 0]) for answer in answers] == [2 * i for i in range(500)]
    status = await model.status()
    assert status.successes == 500
    assert status.batches < 500


@gen_cluster(client=True)
async def test_large_inputs_and_outputs(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, double)
    x = np.random.default_rng(0).normal(size=(10, 100_000))
    answers = await asyncio.gather(
        model.submit(x), client.submit(model, x), model.submit(model.submit(x))
    )
    np.testing.assert_array_equal(answers[0], x * 2)
    np.testing.assert_array_equal(answers[1], x * 2)
    np.testing.assert_array_equal(answers[2], x * 4)
