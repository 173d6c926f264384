"""Batches that take too long in a cluster, and results that come late."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest
from distributed import Nanny, Status, wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import BatchTimeout, BreakerPolicy, RetryPolicy
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2
SUSPICIOUS = {"daskinfer.health.suspect-after": "200ms"}
#: Dask runs callbacks of futures on a thread that stays.
CALLBACKS = {"threads": False}
#: A breaker that is soon half-open.
SOON = BreakerPolicy(cooldown="50ms", max_cooldown="100ms")

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def ask_all(client: Any, way: str, model: Any, xs: list[Any]) -> list[Any]:
    return client.map(model, xs) if way == "client" else model.map(xs)


def answered_by(futures: list[Any]) -> Counter[Any]:
    """How often each future is told that it has ended."""
    calls: Counter[Any] = Counter()
    for future in futures:
        future.add_done_callback(lambda f: calls.update([f.key]))
    return calls


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_batch_past_its_time_fails_by_name(c, s, a, way):
    probe = Probe()
    model = await deploy(
        c,
        probe,
        warmup=ONE,
        batch_timeout="50ms",
        retry=RetryPolicy(max_attempts=1),
        breaker=SOON,
    )
    probe.close()
    (future,) = ask_all(c, way, model, [ONE])
    error = await future.exception()
    assert isinstance(error, BatchTimeout) and isinstance(error, TimeoutError)
    assert (error.key, error.name, error.worker) == (future.key, "m", a.address)
    status = await model.status()
    (worker,) = status.workers
    assert (worker.state, worker.breaker, worker.healthy) == ("ready", "open", False)
    assert "ran for longer than 0.05 s" in worker.reason
    # Whoever waits is told why.
    (waiting,) = ask_all(c, way, model, [row(3)])
    await until(lambda: len(engine(s).dispatcher.lines["m", "1"].queue) == 1)
    status = await model.status()
    assert "no worker is fit" in status.problem
    assert "ran for longer than 0.05 s" in status.problem
    probe.open()
    assert np.array_equal(await waiting, row(6))
    status = await model.status()
    assert status.workers[0].breaker == "closed" and status.workers[0].healthy
    assert (status.waiting, status.in_flight, status.failures) == (0, 0, 1)
    del future, waiting, error
    if way == "model":
        await nothing_is_left(s, a)


@both_ways
@gen_cluster(
    client=True, nthreads=TWO_WORKERS, config=SUSPICIOUS, clean_kwargs=CALLBACKS
)
async def test_late_results_are_used_if_still_wanted(c, s, a, b, way):
    """The first attempt ends while the second one is still running."""
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.calls.clear()
    probe.close()
    (future,) = ask_all(c, way, model, [row(2)])
    key = future.key
    calls = answered_by([future])
    await probe.entered(2)
    first, second = engine(s).dispatcher.running.batches.values()
    assert not first.requests and list(second.requests) == [key]
    assert first.device is not second.device
    probe.open()
    assert np.array_equal(await future, row(4))
    await until(lambda: not engine(s).dispatcher.running.batches)
    s.validate_state()
    # Whichever came first: the other is dropped, and one worker holds the result.
    await until(lambda: sum(key in w.data for w in (a, b)) == 1)
    (holder,) = s.tasks[key].who_has
    assert key in {a.address: a, b.address: b}[holder.address].data
    await until(lambda: calls[key] > 0)
    assert calls == {key: 1}
    status = await model.status()
    assert (status.successes, status.failures, status.in_flight) == (1, 0, 0)
    del future, first, second
    if way == "model":
        await nothing_is_left(s, a, b)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER, clean_kwargs=CALLBACKS)
async def test_a_late_result_ends_a_request_that_waits_for_another_try(c, s, a, way):
    probe = Probe()
    model = await deploy(
        c,
        probe,
        warmup=ONE,
        batch_timeout="50ms",
        retry=RetryPolicy(backoff="1h", max_backoff="1h"),
        breaker=BreakerPolicy(cooldown="1h", max_cooldown="1h"),
    )
    probe.calls.clear()
    probe.close()
    futures = ask_all(c, way, model, [row(1), row(2)])
    key = futures[0].key
    calls = answered_by(futures)
    recovery = engine(s).dispatcher.recovery
    await until(lambda: len(recovery.delayed) == 2)
    gone = futures.pop()
    await gone.cancel()
    await until(lambda: len(recovery.delayed) == 1)
    probe.open()
    assert np.array_equal(await futures[0], row(2))
    await until(lambda: list(a.data) == [key])
    s.validate_state()
    assert len(probe.calls) == 1
    await until(lambda: calls[key] > 0)
    assert calls[key] == 1
    assert (await daskinfer.info(futures[0])).attempts == 1
    del futures, gone
    if way == "model":
        await nothing_is_left(s, a)


def increment() -> Any:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: np.ndarray) -> np.ndarray:
        return x + 1

    return answer


@both_ways
@gen_cluster(
    client=True,
    nthreads=TWO_WORKERS,
    Worker=Nanny,
    config={"daskinfer.health.suspect-after": "500ms"},
    clean_kwargs=CALLBACKS,
    timeout=120,
)
async def test_a_process_that_stops_and_goes_on(c, s, a, b, way):
    model = await deploy(c, increment(), max_batch_size=4, warmup=ONE)
    assert a.process is not None
    dispatcher = engine(s).dispatcher
    line = dispatcher.lines["m", "1"]
    os.kill(a.pid, signal.SIGSTOP)
    try:
        futures = ask_all(c, way, model, [row(i) for i in range(40)])
        calls = answered_by(futures)
        for i, future in enumerate(futures):
            assert np.array_equal(await future, row(i + 1))
        stopped = line.devices[a.worker_address]
        assert stopped.stuck and stopped.flights
        status = await model.status()
        by_address = {w.address: w for w in status.workers}
        suspect = by_address[a.worker_address]
        assert (suspect.breaker, suspect.healthy) == ("open", False)
        assert "has not answered batch" in suspect.reason
        assert by_address[b.worker_address].healthy
    finally:
        os.kill(a.pid, signal.SIGCONT)
    await until(lambda: not dispatcher.running.batches)
    s.validate_state()
    await until(lambda: len(calls) == 40)
    assert set(calls.values()) == {1}
    # It is admitted again, and serves its part.
    before = dispatcher.statistics["m"].successes
    assert before == 40
    again = ask_all(c, way, model, [row(100 + i) for i in range(40)])
    await wait(again)
    pinned = model.options(workers=[a.worker_address]).submit(row(0))
    assert np.array_equal(await pinned, row(1))
    status = await model.status()
    assert [w.breaker for w in status.workers] == ["closed", "closed"]
    assert all(w.healthy for w in status.workers)
    assert a.worker_address in s.workers
    del futures, future, again, pinned
    if way == "model":
        await nothing_is_left(s)


def endless() -> Any:
    def answer(x: np.ndarray) -> np.ndarray:
        import threading

        if (x == 13).any():
            threading.Event().wait()
        return x + 1

    return answer


def all_are_there(scheduler: Any, *nannies: Nanny) -> bool:
    """Whether no process is about to be replaced, and each serves the model."""
    dispatcher = engine(scheduler).dispatcher
    return (
        not dispatcher.fitness.stuck
        and len(dispatcher.lines["m", "1"].devices) == len(nannies)
        and all(nanny.status is Status.running for nanny in nannies)
    )


@gen_cluster(
    client=True,
    nthreads=TWO_WORKERS,
    Worker=Nanny,
    config={"daskinfer.health.replace-after": "300ms"},
    timeout=120,
)
async def test_an_input_that_never_ends_costs_processes_but_no_answers(c, s, a, b):
    model = await deploy(
        c, endless(), max_batch_size=16, warmup=ONE, batch_timeout="300ms", breaker=SOON
    )
    futures = model.map([row(i) for i in range(40)])
    for i, future in enumerate(futures):
        if i == 13:
            assert isinstance(await future.exception(), BatchTimeout)
        else:
            assert np.array_equal(await future, row(i + 1))
    # Each of them has run it, and is there again.
    await until(lambda: all_are_there(s, a, b))
    again = model.map([row(i) for i in range(20, 40)])
    for i, future in enumerate(again):
        assert np.array_equal(await future, row(i + 21))
    del futures, future, again
    await nothing_is_left(s)
    # A Nanny that is closed while it starts a process leaves that behind.
    await until(lambda: all_are_there(s, a, b))


@gen_cluster(client=True, nthreads=[])
async def test_what_is_asked_for_is_checked_where_it_is_given(c, s):
    with pytest.raises(ValueError, match="batch_timeout must be above 0"):
        await daskinfer.deploy(c, Probe(), batch_timeout=0)
    with pytest.raises(TypeError, match="breaker must be a BreakerPolicy"):
        await daskinfer.deploy(c, Probe(), breaker={"failures": 3})
    model = await deploy(c, Probe(), breaker=BreakerPolicy(7), wait=False)
    assert engine(s).registry.deployment(model.name).breaker.failures == 7
