"""A user's own tasks beside inference: neither waits for the other."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from distributed import get_client, get_worker, wait, worker_client
from distributed.utils_test import gen_cluster, inc

import daskinfer
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, queued

#: The calls into Dask's inner workings, also on its oldest supported release.
pytestmark = pytest.mark.smoke

ONE_THREAD = [("127.0.0.1", 1)]
WITH_NPU = [("127.0.0.1", 2, {"resources": {"NPU": 1}})]


def row(value: float) -> np.ndarray:
    return np.full((1, 1), value)


@gen_cluster(client=True, nthreads=ONE_THREAD)
async def test_a_batch_does_not_wait_behind_a_users_task(c, s, a):
    model = await deploy(c, Probe())
    task = Probe(is_open=False)
    running, next_one = c.submit(task, 1), c.submit(task, 2)
    await task.entered()
    # Its only thread is taken, and will be until the answer is there.
    assert np.array_equal(await model.submit(ONE), 2 * ONE)
    task.open()
    assert await c.gather([running, next_one]) == [2, 4]


@gen_cluster(client=True, nthreads=ONE_THREAD * 2)
async def test_trivial_tasks_do_not_wait_for_the_inference_to_end(c, s, a, b):
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=2, warmup=ONE)
    probe.calls.clear()
    probe.close()
    load = model.map([row(i) for i in range(400)])
    await probe.entered(2)
    # Both devices are full, many wait, and nothing will end before the tasks have.
    await until(lambda: len(engine(s).dispatcher.running.batches) == 4)
    assert await c.gather(c.map(inc, range(40))) == list(range(1, 41))
    probe.open()
    await wait(load)


@gen_cluster(client=True, nthreads=ONE_THREAD * 2)
async def test_requests_are_answered_while_many_tasks_wait(c, s, a, b):
    model = await deploy(c, Probe())
    task = Probe(is_open=False)
    tasks = c.map(task, range(50))
    await task.entered(2)
    futures = model.map([row(i) for i in range(50)])
    for i, y in enumerate(await daskinfer.gather(futures)):
        assert np.array_equal(y, row(2 * i))
    task.open()
    await wait(tasks)


@gen_cluster(client=True, nthreads=WITH_NPU)
async def test_a_batch_waits_for_a_task_that_has_the_device(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, device="cpu", resources={"NPU": 1})
    account = a.plugins["daskinfer-runtime"].device.account
    task = Probe(is_open=False)
    holder = c.submit(task, 1, resources={"NPU": 1})
    await task.entered()
    future = model.submit(ONE)
    await until(lambda: account._waiting)
    assert probe.calls == []
    task.open()
    assert np.array_equal(await future, 2 * ONE)
    assert await holder == 2
    assert a.state.available_resources == a.state.total_resources == {"NPU": 1}


@gen_cluster(client=True, nthreads=WITH_NPU)
async def test_a_task_waits_for_a_batch_that_has_the_device(c, s, a):
    probe = Probe()
    model = await deploy(c, probe, device="cpu", resources={"NPU": 1})
    probe.close()
    future = model.submit(ONE)
    await probe.entered()
    task = Probe()
    waiting = c.submit(task, 1, resources={"NPU": 1})
    await until(lambda: waiting.key in a.state.tasks)
    assert a.state.tasks[waiting.key].state == "constrained"
    # One that does not want the device has a thread to run on.
    assert await c.submit(inc, 1) == 2
    assert task.calls == []
    probe.open()
    assert await waiting == 2
    assert np.array_equal(await future, 2 * ONE)
    assert a.state.available_resources == a.state.total_resources == {"NPU": 1}


class Device:
    """Notes who used it, and whether two ever did at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.users: list[str] = []
        self.shared = False

    @contextmanager
    def used_by(self, name: str):
        alone = self._lock.acquire(blocking=False)
        self.shared |= not alone
        self.users.append(name)
        try:
            yield
        finally:
            if alone:
                self._lock.release()

    def probe(self, name: str) -> Probe:
        def use(x):
            with self.used_by(name):
                return x

        return Probe(use)


@gen_cluster(client=True, nthreads=WITH_NPU)
async def test_tasks_and_batches_share_the_device_and_both_get_their_turn(c, s, a):
    device = Device()
    batches, task = device.probe("batch"), device.probe("task")
    model = await deploy(
        c, batches, device="cpu", resources={"NPU": 1}, max_batch_size=1, warmup=ONE
    )
    batches.close()
    first = model.submit(row(0))
    await batches.entered()
    device.users.clear()
    requests = model.map([row(i) for i in range(1, 21)])
    tasks = c.map(task, range(20), resources={"NPU": 1})
    await queued(s, 19)
    await until(lambda: len(a.state.tasks) >= 20)
    batches.open()
    await wait([first, *requests, *tasks])
    assert not device.shared
    assert sorted(device.users) == ["batch"] * 21 + ["task"] * 20
    # Neither had to wait for the end of the other.
    for one, other in [("batch", "task"), ("task", "batch")]:
        last = len(device.users) - 1 - device.users[::-1].index(one)
        assert device.users.index(other) < last
        middle = device.users[: len(device.users) // 2]
        assert middle.count(one) >= 5


@gen_cluster(client=True, nthreads=WITH_NPU)
async def test_the_device_is_free_again_after_batches_that_failed(c, s, a):
    def fail(x):
        raise ValueError("no")

    model = await deploy(c, Probe(fail), device="cpu", resources={"NPU": 1})
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await model.submit(ONE)
    assert await c.submit(inc, 1, resources={"NPU": 1}) == 2
    assert a.state.available_resources == a.state.total_resources == {"NPU": 1}


NESTED = {
    "call": lambda model, x: model(x),
    "submit": lambda model, x: model.submit(x).result(),
    "get_client": lambda model, x: get_client().submit(model, x).result(),
    "predict": lambda model, x: model.predict(x),
}


@pytest.mark.parametrize("way", list(NESTED))
@gen_cluster(
    client=True,
    nthreads=ONE_THREAD * 2,
    client_kwargs={"set_as_default": False},
)
async def test_a_request_inside_a_task_does_not_deadlock(c, s, a, b, way):
    model = await deploy(c, Probe())
    ask = NESTED[way]

    def task(i):
        return ask(model, np.full((1, 1), float(i))).item()

    # More tasks than threads: every thread waits in a request.
    assert await c.gather(c.map(task, range(8))) == [2 * i for i in range(8)]


@gen_cluster(client=True, nthreads=ONE_THREAD, client_kwargs={"set_as_default": False})
async def test_a_request_inside_a_task_that_secedes(c, s, a):
    model = await deploy(c, Probe())

    def task(i):
        with worker_client() as client:
            return client.submit(model, np.full((1, 1), float(i))).result().item()

    assert await c.gather(c.map(task, range(8))) == [2 * i for i in range(8)]


@gen_cluster(client=True, nthreads=ONE_THREAD)
async def test_a_model_may_ask_for_its_worker(c, s, a):
    model = await deploy(c, Probe(lambda x: [get_worker().address] * len(x)))
    assert await model.submit(ONE) == [a.address]
