"""Inputs that fail, and what they are sent to that is there no more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client, Nanny
from distributed.utils_test import gen_cluster

from daskinfer import UnknownDeployment
from daskinfer.exceptions import SchedulerLost
from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.imap_helpers import (
    ONE_WORKER,
    TWO_WORKERS,
    Source,
    first,
    orders,
    reading_threads,
    rest,
    row,
    values,
)
from tests.cluster.scheduling_helpers import ONE, deploy, nothing_is_left, queued


def picky(x: np.ndarray) -> np.ndarray:
    """Twice its input, unless that is a multiple of 100."""
    if (x % 100 == 99).any():
        raise ArithmeticError(f"not {int(x.max())}")
    return x * 2


@pytest.mark.parametrize("max_in_flight", ["auto", 7])
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_failing_inputs_are_returned(
    c: Client, s: Any, a: Any, b: Any, max_in_flight: Any
) -> None:
    model = await deploy(c, picky, warmup=ONE)
    results = model.aimap(Source(), on_error="return", max_in_flight=max_in_flight)
    found = await first(results, 1000)
    await results.aclose()
    failed = [i for i, r in enumerate(found) if isinstance(r, Exception)]
    assert failed == list(range(99, 1000, 100))
    assert [str(found[i]).splitlines()[0] for i in failed] == [
        f"not {i}" for i in failed
    ]
    answered = [r for r in found if not isinstance(r, Exception)]
    assert values(answered) == [2.0 * i for i in range(1000) if i % 100 != 99]
    del found, results, answered
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_failing_input_is_raised_in_its_turn(
    c: Client, s: Any, a: Any, b: Any
) -> None:
    model = await deploy(c, picky, warmup=ONE)
    results = model.aimap(Source())
    found = []
    with pytest.raises(ArithmeticError, match="not 99"):
        async for result in results:
            found.append(result)
    assert values(found) == [2.0 * i for i in range(99)]
    # That was the end.
    assert await rest(results) == []
    await nothing_is_left(s, a, b)


@orders
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_cannot_be_sent_fails_alone(
    c: Client, s: Any, a: Any, ordered: bool
) -> None:
    model = await deploy(c, Probe())
    inputs = [ONE, threading.Lock(), ONE]
    results = await rest(model.aimap(inputs, on_error="return", ordered=ordered))
    failed = [isinstance(result, Exception) for result in results]
    assert failed == [False, True, False] if ordered else sum(failed) == 1
    with pytest.raises(TypeError, match="pickle"):
        await rest(model.aimap(inputs, ordered=ordered))
    await nothing_is_left(s, a)


@pytest.mark.parametrize("on_error", ["raise", "return"])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_inputs_that_raise(c: Client, s: Any, a: Any, on_error: str) -> None:
    model = await deploy(c, Probe())

    def inputs() -> Iterator[np.ndarray]:
        yield from map(row, range(50))
        raise LookupError("the disk is gone")

    results = model.aimap(inputs(), on_error=on_error)
    assert values(await first(results, 50)) == [2.0 * i for i in range(50)]
    with pytest.raises(LookupError, match="the disk is gone"):
        await anext(results)
    assert await rest(results) == []
    await nothing_is_left(s, a)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_error_that_means_the_end_does_not_end_it_silently(
    c: Client, s: Any, a: Any, kind: type[Exception]
) -> None:
    def answer(x: np.ndarray) -> np.ndarray:
        raise kind("no")

    model = await deploy(c, answer, name="m")
    with pytest.raises(RuntimeError, match=f"led to {kind.__name__}"):
        await rest(model.aimap([ONE]))
    with pytest.raises(RuntimeError, match=f"led to {kind.__name__}"):
        await asyncio.to_thread(lambda: list(model.imap([ONE])))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_inputs_that_block_hold_back_no_results(
    c: Client, s: Any, a: Any
) -> None:
    model = await deploy(c, Probe())
    goes_on = threading.Event()

    def inputs() -> Iterator[np.ndarray]:
        yield from map(row, range(5))
        if not goes_on.wait(PATIENCE):
            raise TimeoutError("the test never let it go on")
        yield row(5)

    results = model.aimap(inputs())
    assert values(await first(results, 5)) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert not goes_on.is_set()
    goes_on.set()
    assert values(await rest(results)) == [10.0]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_full_queue_is_waited_out(c: Client, s: Any, a: Any) -> None:
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE, max_queue=4)
    probe.close()
    others = model.map([ONE] * 2)
    await until(lambda: len(s.plugins["daskinfer"].dispatcher.running.batches) == 2)
    others += model.map([ONE] * 4)
    await queued(s, 4)
    async with model.aimap(map(row, range(30))) as results:
        taking = asyncio.ensure_future(rest(results))
        await until(lambda: results._flow._backoff.seconds > 0.1)
        assert results._flow._window.sent <= 4
        probe.open()
        assert values(await taking) == [2.0 * i for i in range(30)]
    assert (np.concatenate(await c.gather(others)) == 2).all()
    del others
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_alone_it_never_fills_the_queue(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe(), warmup=ONE, max_queue=3)
    for limit in ("auto", 50):
        found = await rest(model.aimap(map(row, range(100)), max_in_flight=limit))
        assert values(found) == [2.0 * i for i in range(100)]
    assert (await model.status()).failures == 0


@gen_cluster(client=True, nthreads=TWO_WORKERS, Worker=Nanny, timeout=120)
async def test_a_worker_dies_in_mid_way(c: Client, s: Any, a: Any, b: Any) -> None:
    model = await deploy(c, _slow(), max_batch_size=4, warmup=ONE)
    async with model.aimap(map(row, range(200))) as results:
        found = await first(results, 20)
        await a.kill(reason="test")
        found += await rest(results)
    assert values(found) == [i + 1.0 for i in range(200)]


def _slow() -> Callable[[np.ndarray], np.ndarray]:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: np.ndarray) -> np.ndarray:
        import time

        time.sleep(0.01)
        return x + 1

    return answer


@pytest.mark.parametrize("on_error", ["raise", "return"])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_undeployed_in_mid_way(c: Client, s: Any, a: Any, on_error: str) -> None:
    """What runs is answered; the rest is the end of it, whatever the mode."""
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    results = model.aimap(Source(), on_error=on_error)
    found = await first(results, 20)
    await model.undeploy()
    with pytest.raises(UnknownDeployment, match="'m'"):
        async for result in results:
            found.append(result)
    assert values(found) == [2.0 * i for i in range(len(found))]
    assert await rest(results) == []
    await until(lambda: not s.tasks)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_not_deployed(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    await model.undeploy()
    source = Source()
    with pytest.raises(UnknownDeployment, match="no deployment is named 'm'"):
        await anext(model.aimap(source, on_error="return"))
    assert source.read == 0
    await until(lambda: not reading_threads())


@pytest.mark.parametrize("on_error", ["raise", "return"])
@gen_cluster(nthreads=ONE_WORKER)
async def test_the_client_is_closed_in_mid_way(s: Any, a: Any, on_error: str) -> None:
    async with Client(s.address, asynchronous=True) as client:
        probe = Probe()
        model = await deploy(client, probe, max_batch_size=1, warmup=ONE)
        results = model.aimap(Source(), on_error=on_error, max_in_flight=5)
        await first(results, 20)
        probe.close()
        taking = asyncio.ensure_future(rest(results))
        await until(lambda: not results._flow._window._ready)
    with pytest.raises(SchedulerLost):
        await taking
    probe.open()
    with pytest.raises(RuntimeError, match=r"the client .* is closed"):
        model.aimap([ONE])
    await until(lambda: not reading_threads())
    await nothing_is_left(s, a)


@gen_cluster(nthreads=ONE_WORKER)
async def test_the_client_is_closed_while_the_inputs_block(s: Any, a: Any) -> None:
    goes_on = threading.Event()

    def inputs() -> Iterator[np.ndarray]:
        yield ONE
        goes_on.wait(PATIENCE)
        yield ONE

    async with Client(s.address, asynchronous=True) as client:
        results = (await deploy(client, Probe())).aimap(inputs())
        await anext(results)
        taking = asyncio.ensure_future(rest(results))
    # Nothing was on its way that could have told.
    with pytest.raises(SchedulerLost):
        await taking
    goes_on.set()
    await until(lambda: not reading_threads())


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_closed_client_before_the_first_result(
    c: Client, s: Any, a: Any
) -> None:
    async with Client(s.address, asynchronous=True) as client:
        model = await deploy(client, Probe())
        results = model.aimap([ONE])
    with pytest.raises(SchedulerLost):
        await anext(results)
    await until(lambda: not reading_threads())


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_cluster_is_restarted_in_mid_way(c: Client, s: Any, a: Any) -> None:
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    results = model.aimap(Source(), max_in_flight=5)
    await first(results, 20)
    probe.close()
    taking = asyncio.ensure_future(rest(results))
    await until(lambda: not results._flow._window._ready)
    restarting = asyncio.ensure_future(c.restart(wait_for_workers=False))
    with pytest.raises(Exception, match=r"cancelled|restart"):
        await taking
    probe.open()
    await restarting
