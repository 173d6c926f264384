"""Requests that are not answered in time, wherever they are then."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest
from distributed import Worker, wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import DeadlineExceeded, NoReadyWorker
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

ONE_WORKER = [("127.0.0.1", 1)]
SOON = "50ms"

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def ask(client: Any, way: str, model: Any, x: Any, timeout: Any = None) -> Any:
    if way == "model":
        return model.options(timeout=timeout).submit(x)
    if timeout is None:
        return client.submit(model, x)
    with dask.annotate(daskinfer={"timeout": timeout}):
        return client.submit(model, x)


async def held(client: Any, scheduler: Any, **kwargs: Any) -> tuple[Probe, Any, Any]:
    """A deployment whose device has two batches that do not end."""
    probe = Probe()
    model = await deploy(client, probe, max_batch_size=1, warmup=ONE, **kwargs)
    probe.calls.clear()
    probe.close()
    ahead = model.options(timeout="1h").map([row(0), row(1)])
    await until(lambda: len(engine(scheduler).dispatcher.running.batches) == 2)
    await probe.entered()
    return probe, model, ahead


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_in_the_queue(c, s, a, way):
    probe, model, ahead = await held(c, s)
    late = ask(c, way, model, row(2), SOON)
    patient = ask(c, way, model, row(3), "1h")
    # At that time, and not when the running batch ends, which is held until later.
    with pytest.raises(DeadlineExceeded, match="waited in the queue") as caught:
        await late
    assert type(caught.value) is DeadlineExceeded
    assert isinstance(caught.value, TimeoutError)
    assert "0.05 s" in str(caught.value) and caught.value.name == "m"
    probe.open()
    assert np.array_equal(await patient, row(6))
    await wait(ahead)
    assert sorted(args[0].item() for args, _ in probe.calls) == [0, 1, 3]
    status = await model.status()
    assert (status.successes, status.failures, status.waiting) == (3, 1, 0)
    del late, patient, ahead, caught
    if way == "model":  # Dask's own futures stay with an exception that was raised
        await nothing_is_left(s, a)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_while_it_runs(c, s, a, way):
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.calls.clear()
    probe.close()
    late = ask(c, way, model, row(1), "200ms")
    await probe.entered()
    with pytest.raises(DeadlineExceeded, match=f"it ran on {a.address}") as caught:
        await late
    error = caught.value
    assert (error.name, error.version, error.worker) == ("m", "1", a.address)
    assert error.attempts == 1
    del caught, error  # its traceback holds the future
    # The late answer is dropped, and the device serves on.
    next_one = ask(c, way, model, row(2))
    probe.open()
    assert np.array_equal(await next_one, row(4))
    assert late.status == "error"
    del late, next_one
    if way == "model":
        await nothing_is_left(s, a)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_while_its_inputs_are_computed(c, s, a, way):
    task = Probe(is_open=False)
    model = await deploy(c, Probe())
    source = c.submit(task, ONE)
    late = ask(c, way, model, source, SOON)
    with pytest.raises(DeadlineExceeded, match="its inputs were computed"):
        await late
    after = c.submit(lambda x: x, late)
    assert isinstance(await after.exception(), DeadlineExceeded)
    task.open()
    await source
    s.validate_state()
    del source, late, after
    if way == "model":
        await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_result_that_is_lost_together_with_its_inputs(c, s, a, b):
    model = await deploy(c, Probe())
    only = {"workers": [a.address]}
    source = c.submit(lambda: ONE, **only)
    late = model.options(timeout="1h", **only).submit(source)
    await late
    key = late.key
    engine(s).requests[key].timeout = 0.05
    await a.close()
    # There is no place for the input any more.
    await until(lambda: s.tasks[key].state == "erred")
    with pytest.raises(DeadlineExceeded, match="its inputs were computed"):
        await late
    del source, late
    await nothing_is_left(s, b)


@both_ways
@gen_cluster(client=True, nthreads=[])
async def test_while_no_worker_is_ready(c, s, way):
    model = await deploy(c, Probe(), wait=False)
    late = ask(c, way, model, ONE, SOON)
    with pytest.raises(NoReadyWorker, match="no worker"):
        await late
    # One that comes in time is served.
    patient = ask(c, way, model, row(2), "1h")
    async with Worker(s.address):
        assert np.array_equal(await patient, row(4))
    del late, patient
    if way == "model":
        await nothing_is_left(s)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_no_worker_that_the_request_itself_may_use(c, s, a):
    model = await deploy(c, Probe())
    wanted = model.options(timeout=SOON, resources={"NPU": 1})
    with pytest.raises(NoReadyWorker, match="NPU: no worker declares it"):
        await wanted.submit(ONE)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_deployments_own_limit_and_a_calls_that_goes_before_it(c, s, a, way):
    probe, model, ahead = await held(c, s, request_timeout=SOON)
    patient = ask(c, way, model, row(3), "1h")
    with pytest.raises(DeadlineExceeded):
        await ask(c, way, model, row(2))
    probe.open()
    assert np.array_equal(await patient, row(6))
    await wait(ahead)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_configured_limits(c, s, a):
    limits = {"request-timeout": "3s", "batch-timeout": "2s", "max-queue": 7}
    with dask.config.set({f"daskinfer.{key}": limit for key, limit in limits.items()}):
        await deploy(c, Probe())
    deployment = engine(s).registry.deployment("m")
    assert (deployment.request_timeout, deployment.max_queue) == (3.0, 7)
    assert deployment.batch_timeout == 2.0


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_annotations_complete_options_of_the_fast_path(c, s, a):
    _probe, model, ahead = await held(c, s)
    with dask.annotate(daskinfer={"timeout": SOON}):
        late = model.submit(row(2))
        patient = model.options(timeout="1h").submit(row(3))
    with dask.annotate(daskinfer=lambda key: {"timeout": SOON}):
        also_late = model.submit(row(4))
    for future in (late, also_late):
        assert isinstance(await future.exception(), DeadlineExceeded)
    assert patient.status == "pending"
    _probe.open()
    await wait([*ahead, patient])


@pytest.mark.parametrize(
    ("annotation", "error", "said"),
    [
        ({"timeout": "-1s"}, ValueError, "timeout must be above 0"),
        ({"timeout": 0}, ValueError, "timeout must be above 0"),
        ({"time": 1}, ValueError, "has time; it knows timeout only"),
        ("2s", TypeError, "must be a dict"),
    ],
)
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_bad_annotations_are_named(c, s, a, annotation, error, said):
    probe = Probe()
    model = await deploy(c, probe)
    with dask.annotate(daskinfer=annotation):
        with pytest.raises(error, match=said):
            model.submit(ONE)
        with pytest.raises(error, match=said):
            await c.submit(model, ONE)
    assert probe.calls == []


@pytest.mark.parametrize("timeout", ["-1s", "soon", 0, float("inf")])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_bad_timeouts_are_refused_where_they_are_given(c, s, a, timeout):
    model = await deploy(c, Probe())
    with pytest.raises(ValueError, match="timeout"):
        model.options(timeout=timeout)
    with pytest.raises(ValueError, match="request_timeout"):
        await daskinfer.deploy(c, Probe(), name="other", request_timeout=timeout)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_retry_of_the_users_has_a_time_of_its_own(c, s, a, way):
    probe, model, ahead = await held(c, s)
    late = ask(c, way, model, row(2), "100ms")
    assert isinstance(await late.exception(), DeadlineExceeded)
    await late.retry()
    await queued(s, 1)
    assert len(engine(s).dispatcher.deadlines) == 3
    assert isinstance(await late.exception(), DeadlineExceeded)
    probe.open()
    await wait(ahead)
    await late.retry()
    assert np.array_equal(await late, row(4))


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_burst_of_timeouts_leaves_no_trace(c, s, a, way):
    probe, model, ahead = await held(c, s)
    late = [ask(c, way, model, row(1000 + i), SOON) for i in range(200)]
    patient = [ask(c, way, model, row(100 + i), "1h") for i in range(20)]
    await wait(late)
    for future in late:
        assert isinstance(await future.exception(), DeadlineExceeded)
    await queued(s, 20)
    probe.open()
    for i, future in enumerate(patient):
        assert np.array_equal(await future, row(200 + 2 * i))
    status = await model.status()
    assert (status.waiting, status.in_flight, status.failures) == (0, 0, 200)
    await wait(ahead)
    del late, patient, future, ahead
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_answer_in_time_ends_the_watch(c, s, a):
    model = await deploy(c, Probe(), request_timeout="1h")
    future = model.submit(ONE)
    assert np.array_equal(await future, 2 * ONE)
    assert len(engine(s).dispatcher.deadlines) == 0
    del future
    await nothing_is_left(s, a)
