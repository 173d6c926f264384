"""Inputs that come one after the other, and may never end."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import operator
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest import mock

import dask
import dask.bag
import numpy as np
import pytest
from distributed import Client, Nanny
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import UnknownDeployment
from daskinfer.exceptions import SchedulerLost
from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, nothing_is_left, queued

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2

orders = pytest.mark.parametrize("ordered", [True, False])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def values(results: list[Any]) -> list[float]:
    return [float(result[0, 0]) for result in results]


def picky(x: np.ndarray) -> np.ndarray:
    """Twice its input, unless that is a multiple of 100."""
    if (x % 100 == 99).any():
        raise ArithmeticError(f"not {int(x.max())}")
    return x * 2


class Source:
    """Inputs without end, which tell how many were read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        for number in itertools.count():
            self.read = number + 1
            yield row(number)


async def rest(results: AsyncIterator[Any]) -> list[Any]:
    return [result async for result in results]


async def first(results: AsyncIterator[Any], count: int) -> list[Any]:
    return [await anext(results) for _ in range(count)]


def reading_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "daskinfer-imap"]


# Results


@orders
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_list(c: Client, s: Any, a: Any, b: Any, ordered: bool) -> None:
    model = await deploy(c, Probe())
    found = values(await rest(model.aimap(map(row, range(500)), ordered=ordered)))
    assert (found if ordered else sorted(found)) == [2.0 * i for i in range(500)]
    await until(lambda: not reading_threads())
    await nothing_is_left(s, a, b)
    assert not c.futures


@orders
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_list_in_a_thread(
    c: Client, s: Any, a: Any, b: Any, ordered: bool
) -> None:
    model = await deploy(c, Probe())

    def iterate() -> list[float]:
        return values(list(model.imap([row(i) for i in range(500)], ordered=ordered)))

    found = await asyncio.to_thread(iterate)
    assert (found if ordered else sorted(found)) == [2.0 * i for i in range(500)]
    await nothing_is_left(s, a, b)
    assert not c.futures


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_results_come_in_order_or_as_they_are_there(
    c: Client, s: Any, a: Any, b: Any
) -> None:
    model = (await deploy(c, Probe())).options(workers=[a.address])

    def inputs(late: Probe) -> list[Any]:
        return [c.submit(late, 0, workers=[b.address]), row(1), row(2), row(3)]

    late = Probe(row, is_open=False)
    async with model.aimap(inputs(late), ordered=False) as results:
        assert sorted(values(await first(results, 3))) == [2.0, 4.0, 6.0]
        late.open()
        assert values(await rest(results)) == [0.0]
    late = Probe(row, is_open=False)
    async with model.aimap(inputs(late)) as results:
        due = asyncio.ensure_future(anext(results))
        await until(lambda: len(results._flow._window._ready) == 3)
        assert not due.done()
        late.open()
        assert values([await due, *await rest(results)]) == [0.0, 2.0, 4.0, 6.0]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_keywords_go_to_the_model_and_tuples_are_inputs(
    c: Client, s: Any, a: Any
) -> None:
    model = await deploy(c, lambda pair, scale: pair[0] * scale + pair[1], name="pair")
    found = model.aimap([(row(1), row(2)), (row(3), row(4))], scale=10)
    assert values(await rest(found)) == [12.0, 34.0]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_inputs_may_be_futures(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    found = model.aimap(c.submit(row, i) for i in range(20))
    assert values(await rest(found)) == [2.0 * i for i in range(20)]
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_large_results_are_fetched(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, lambda x: np.repeat(x, 300_000, axis=1), name="m")
    found = await rest(model.aimap(row(i) for i in range(10)))
    assert [r.shape for r in found] == [(1, 300_000)] * 10
    assert values(found) == [float(i) for i in range(10)]
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_options_apply_to_every_request(c: Client, s: Any, a: Any) -> None:
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.close()
    results = model.options(timeout="10ms").aimap([ONE, ONE], on_error="return")
    errors = await rest(results)
    assert [type(error) for error in errors] == [daskinfer.DeadlineExceeded] * 2
    probe.open()
    with pytest.raises(ValueError, match="key= names one result; aimap sends many"):
        model.options(key="k").aimap([ONE])


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_annotations_apply_to_every_request(c: Client, s: Any, a: Any) -> None:
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.close()
    with dask.annotate(daskinfer={"timeout": "10ms"}):
        results = model.aimap([ONE], on_error="return")
        (error,) = await rest(results)
    assert isinstance(error, daskinfer.DeadlineExceeded)
    probe.open()


# Inputs without end


@orders
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_no_more_is_read_than_is_wanted(
    c: Client, s: Any, a: Any, b: Any, ordered: bool
) -> None:
    """The count of what was read and not taken is bounded, also while nobody takes."""
    model = await deploy(c, Probe(), warmup=ONE)
    source = Source()
    async with model.aimap(source, ordered=ordered, max_in_flight=10) as results:
        assert source.read == 0
        for count in range(1, 300):
            await anext(results)
            assert source.read - count <= 10
        await until(lambda: results._flow._window.unanswered == 0)
        assert source.read <= 299 + 10
        assert len(s.tasks) <= 10
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_as_many_are_on_their_way_as_keep_the_workers_busy(
    c: Client, s: Any, a: Any, b: Any
) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe, max_batch_size=4, allowed_batch_sizes=[4])
    source = Source()
    async with model.aimap(source) as results:
        taking = asyncio.ensure_future(first(results, 200))
        # Six batches of four for each of two workers.
        await until(lambda: source.read == 48)
        await queued(s, 48 - 4 * len(s.plugins["daskinfer"].dispatcher.running.batches))
        probe.open()
        assert values(await taking) == [2.0 * i for i in range(200)]
        window = results._flow._window
        assert window.bounds == (48, 96)
        # Nobody takes any more.
        await until(lambda: not window.unanswered)
        assert source.read <= 200 + 96
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_requests_of_many_rows_are_fewer(c: Client, s: Any, a: Any) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe, allowed_batch_sizes=[4])
    read = []

    def inputs() -> Iterator[np.ndarray]:
        for number in itertools.count():
            read.append(number)
            yield np.full((8, 1), float(number))

    async with model.aimap(inputs()) as results:
        taking = asyncio.ensure_future(first(results, 10))
        await probe.entered()
        await until(lambda: results._flow._reader_waits)
        assert len(read) == 3
        probe.open()
        assert values(await taking) == [2.0 * i for i in range(10)]


@gen_cluster(
    client=True, nthreads=ONE_WORKER, config={"daskinfer.imap.memory": "1 MiB"}
)
async def test_large_inputs_are_fewer(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, lambda x: x.sum(1), name="m", warmup=ONE)
    read = 0

    def inputs() -> Iterator[np.ndarray]:
        nonlocal read
        for number in itertools.count():
            read += 1
            yield np.full((1, 2**15), float(number))

    async with model.aimap(inputs()) as results:
        for count in range(1, 100):
            await anext(results)
            # Of a quarter of a MiB each.
            assert read - count <= 4


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_bounds_follow_the_learned_batch_size(
    c: Client, s: Any, a: Any, b: Any
) -> None:
    model = await deploy(c, Probe())
    async with model.aimap(Source()) as results:
        window = results._flow._window
        await anext(results)
        bounds = {window.bounds}
        # A batch costs the same whatever its size, which is found out step by step.
        while max(bounds).in_flight < 200:
            await anext(results)
            bounds.add(window.bounds)
        assert len(bounds) > 1
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_was_answered_is_let_go_of_when_it_is_quiet(
    c: Client, s: Any, a: Any
) -> None:
    model = await deploy(c, Probe())
    goes_on = threading.Event()

    def inputs() -> Iterator[np.ndarray]:
        yield from map(row, range(50))
        goes_on.wait(PATIENCE)

    async with model.aimap(inputs()) as results:
        await first(results, 50)
        await nothing_is_left(s, a)
        goes_on.set()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_few_that_were_answered_are_held(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe(), allowed_batch_sizes=[4])
    with mock.patch("daskinfer.imap.pace._HELD", 30):
        async with model.aimap(Source()) as results:
            await first(results, 200)
            # Those on their way, those that were not taken, and those held.
            assert len(s.tasks) <= 24 + 48 + 30
            assert len(results._flow._requests._held) <= 30
    await nothing_is_left(s, a)


# Failures


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


# Stopping


async def _leave_the_loop(results: Any) -> None:
    async for _ in results:
        break


async def _let_go(results: Any) -> None:
    await anext(results)


async def _close(results: Any) -> None:
    await anext(results)
    await results.aclose()


async def _leave_the_block(results: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with results:
            await anext(results)
            raise ZeroDivisionError


async def _cancel(results: Any) -> None:
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in results:
            begun.set()

    task = asyncio.ensure_future(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "stop", [_leave_the_loop, _let_go, _close, _leave_the_block, _cancel]
)
@orders
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_stopping_early_leaves_nothing(
    c: Client, s: Any, a: Any, b: Any, ordered: bool, stop: Any
) -> None:
    probe = Probe()
    model = await deploy(c, probe, max_batch_size=1, warmup=ONE)
    await stop(model.aimap(Source(), ordered=ordered))
    gc.collect()
    await until(lambda: not reading_threads() and not c.futures)
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_stopping_cancels_what_waits(c: Client, s: Any, a: Any) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe, max_batch_size=1)
    results = model.aimap(Source())
    taking = asyncio.ensure_future(rest(results))
    await probe.entered()
    await until(lambda: results._flow._reader_waits)
    await results.aclose()
    # Whoever waits for a result is told that there are no more.
    assert await taking == []
    await until(lambda: not s.tasks)
    probe.open()
    await nothing_is_left(s, a)
    assert (await model.status()).cancelled >= 4


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_stopping_while_the_inputs_block(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    blocked, goes_on = threading.Event(), threading.Event()

    def inputs() -> Iterator[np.ndarray]:
        yield ONE
        blocked.set()
        goes_on.wait(PATIENCE)
        yield ONE

    def iterate() -> None:
        with model.imap(inputs()) as results:
            assert (next(results) == 2).all()
            assert blocked.wait(PATIENCE)

    await asyncio.to_thread(iterate)
    await nothing_is_left(s, a)
    (thread,) = reading_threads()
    assert thread.daemon
    goes_on.set()
    await until(lambda: not thread.is_alive())
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_coroutine_that_is_cancelled_takes_no_result(
    c: Client, s: Any, a: Any
) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe)
    results = model.aimap(map(row, range(10)))
    waiting = asyncio.ensure_future(anext(results))
    await probe.entered()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    probe.open()
    assert values(await rest(results)) == [2.0 * i for i in range(10)]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_one_that_was_never_begun(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    source = Source()
    unused = model.aimap(source)
    await model.aimap(source).aclose()
    assert await rest(model.aimap([])) == []
    del unused
    gc.collect()
    assert source.read == 0
    await until(lambda: not reading_threads())


# Side by side


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_two_at_a_time(c: Client, s: Any, a: Any, b: Any) -> None:
    double = await deploy(c, Probe(), name="double")
    triple = await deploy(c, lambda x: x * 3, name="triple")
    both = await asyncio.gather(
        rest(double.aimap(map(row, range(300)))),
        rest(double.aimap(map(row, range(300, 600)))),
        rest(triple.aimap(map(row, range(300)))),
    )
    for found, factor, start in zip(both, (2, 2, 3), (0, 300, 0), strict=True):
        assert values(found) == [factor * float(i) for i in range(start, start + 300)]
    del both, found
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_one_after_the_other(c: Client, s: Any, a: Any) -> None:
    """The results of one are the inputs of another, without end."""
    double = await deploy(c, Probe(), name="double")
    triple = await deploy(c, lambda x: x * 3, name="triple")

    def iterate() -> list[Any]:
        with triple.imap(double.imap(Source())) as results:
            return list(itertools.islice(results, 100))

    assert values(await asyncio.to_thread(iterate)) == [6.0 * i for i in range(100)]
    gc.collect()
    await until(lambda: not reading_threads())
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_threads_share_the_results(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())

    def iterate() -> list[float]:
        results = model.imap(map(row, range(400)))
        shares: list[list[Any]] = [[], [], []]
        threads = [
            threading.Thread(target=lambda s=share: s.extend(results))
            for share in shares
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return values(list(itertools.chain.from_iterable(shares)))

    assert sorted(await asyncio.to_thread(iterate)) == [2.0 * i for i in range(400)]


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_inside_a_task(c: Client, s: Any, a: Any, b: Any) -> None:
    model = await deploy(c, Probe())

    def task(model: Any) -> float:
        return float(sum(result[0, 0] for result in model.imap(map(row, range(50)))))

    assert await c.submit(task, model) == 2.0 * sum(range(50))


# Async inputs


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_async_inputs(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    goes_on = asyncio.Event()

    async def inputs() -> AsyncIterator[np.ndarray]:
        for i in range(100):
            yield row(i)
        await goes_on.wait()
        raise LookupError("no more")

    results = model.aimap(inputs(), max_in_flight=8)
    assert values(await first(results, 100)) == [2.0 * i for i in range(100)]
    goes_on.set()
    with pytest.raises(LookupError, match="no more"):
        await anext(results)
    with pytest.raises(TypeError, match="read by coroutines only; use aimap"):
        await asyncio.to_thread(lambda: model.imap(inputs()))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_async_inputs_without_end(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    read = 0
    closed = asyncio.Event()

    async def inputs() -> AsyncIterator[np.ndarray]:
        nonlocal read
        try:
            for i in itertools.count():
                read += 1
                yield row(i)
        finally:
            closed.set()

    async with model.aimap(inputs(), max_in_flight=6) as results:
        for count in range(1, 101):
            await anext(results)
            assert read - count <= 6
    await asyncio.wait_for(closed.wait(), PATIENCE)
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_async_inputs_that_block_are_stopped(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    stopped = asyncio.Event()

    async def inputs() -> AsyncIterator[np.ndarray]:
        yield ONE
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with model.aimap(inputs()) as results:
        await anext(results)
    await asyncio.wait_for(stopped.wait(), PATIENCE)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_on_an_event_loop_that_is_not_the_clients(
    c: Client, s: Any, a: Any
) -> None:
    model = await deploy(c, Probe())

    async def consume() -> list[Any]:
        async def inputs() -> AsyncIterator[np.ndarray]:
            for i in range(100):
                yield row(i)

        found = await rest(model.aimap(inputs()))
        found += await rest(model.aimap(map(row, range(100))))
        await first(model.aimap(Source()), 10)
        return found

    found = await asyncio.to_thread(lambda: asyncio.run(consume()))
    assert values(found) == [2.0 * i for i in range(100)] * 2
    gc.collect()
    await nothing_is_left(s, a)


# Bags


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_bag(c: Client, s: Any, a: Any, b: Any) -> None:
    model = await deploy(c, Probe())
    bag = dask.bag.from_sequence(range(100), npartitions=10).map(row)
    results = model.aimap(bag)
    assert operator.length_hint(results, -1) == -1
    assert values(await rest(results)) == [2.0 * i for i in range(100)]
    found = await asyncio.to_thread(
        lambda: list(model.imap(bag.filter(lambda x: x < 7)))
    )
    assert values(found) == [2.0 * i for i in range(7)]
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_bag_is_not_computed_as_a_whole(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    probe = Probe(lambda i: [row(i)] * 5)
    bag = dask.bag.from_sequence(range(100), npartitions=100).map(probe).flatten()
    async with model.aimap(bag, max_in_flight=3) as results:
        assert values(await first(results, 5)) == [0.0] * 5
        # Those that are being read, and the one ahead.
        assert len(probe.calls) <= 4
    await until(lambda: not reading_threads())
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_bag_that_is_being_computed_is_cancelled(
    c: Client, s: Any, a: Any, b: Any
) -> None:
    model = await deploy(c, Probe(), warmup=ONE)
    probe = Probe(row, is_open=False)
    results = model.aimap(dask.bag.from_sequence(range(4), npartitions=4).map(probe))
    taking = asyncio.ensure_future(rest(results))
    await probe.entered()
    await results.aclose()
    assert await taking == []
    # The thread does not wait for the partition.
    await until(lambda: not reading_threads())
    probe.open()
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_bag_that_fails(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())

    def load(i: int) -> np.ndarray:
        if i == 7:
            raise OSError("cannot read 7")
        return row(i)

    results = model.aimap(dask.bag.from_sequence(range(10), npartitions=5).map(load))
    assert values(await first(results, 6)) == [2.0 * i for i in range(6)]
    with pytest.raises(OSError, match="cannot read 7"):
        await anext(results)


# What can be told of them


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_length(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    known = model.aimap([ONE] * 5)
    assert (len(known), operator.length_hint(known)) == (5, 5)
    await first(known, 2)
    assert (len(known), operator.length_hint(known)) == (3, 3)
    hinted = model.aimap(iter([ONE] * 5))
    assert operator.length_hint(hinted) == 5
    with pytest.raises(TypeError, match="not known"):
        len(hinted)
    unknown = model.aimap(ONE for _ in range(5))
    assert operator.length_hint(unknown, -1) == -1
    with pytest.raises(TypeError, match="not known"):
        len(unknown)
    assert known and hinted and unknown
    assert repr(unknown) == "<AsyncImap of <Model 'm'> not started>"
    assert repr(known) == "<AsyncImap of <Model 'm'> running>"
    await rest(known)
    assert repr(known) == "<AsyncImap of <Model 'm'> ended>"
    assert len(known) == 0 and known


def test_tqdm_knows_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from tqdm import tqdm

    # Its own watch over bars outlives them.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)

    @gen_cluster(client=True, nthreads=ONE_WORKER)
    async def run(c: Client, s: Any, a: Any) -> None:
        model = await deploy(c, Probe())

        def iterate(inputs: Any) -> tuple[int | None, int]:
            with tqdm(model.imap(inputs), file=io.StringIO()) as bar:
                return bar.total, len(list(bar))

        assert await asyncio.to_thread(iterate, [ONE] * 5) == (5, 5)
        assert await asyncio.to_thread(iterate, iter([ONE] * 5)) == (None, 5)

    run()


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_in_flight": 0}, ValueError, "max_in_flight must be at least 1, got 0"),
        ({"max_in_flight": -1}, ValueError, "max_in_flight must be at least 1, got -1"),
        ({"max_in_flight": 1.5}, TypeError, "max_in_flight must be an integer"),
        ({"max_in_flight": True}, TypeError, "max_in_flight must be an integer"),
        ({"max_in_flight": None}, TypeError, "max_in_flight must be an integer"),
        ({"max_in_flight": "8"}, ValueError, "must be \"auto\" or an integer, not '8'"),
        ({"on_error": "skip"}, ValueError, "on_error must be 'raise' or 'return'"),
        ({"ordered": "yes"}, TypeError, "ordered must be True or False, not 'yes'"),
        ({"iterable": "text"}, TypeError, "not one str; put it into a list"),
        ({"iterable": b"text"}, TypeError, "not one bytes; put it into a list"),
        ({"iterable": 5}, TypeError, "an iterable of inputs, not int"),
        ({"iterable": None}, TypeError, "an iterable of inputs, not NoneType"),
        ({"iterable": np.float64(1)}, TypeError, "iterable"),
    ],
)
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_bad_arguments_are_refused_at_once(
    c: Client, s: Any, a: Any, arguments: Any, error: Any, match: str
) -> None:
    model = await deploy(c, Probe())
    arguments = {"iterable": [ONE], **arguments}
    for way in (model, model.options(priority=1)):
        with pytest.raises(error, match=match):
            way.aimap(**arguments)
        with pytest.raises(error, match=match):
            await asyncio.to_thread(lambda way=way: way.imap(**arguments))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_dask_collections_that_are_no_bags(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    with pytest.raises(TypeError, match="not a dask Array; compute it, or use model"):
        model.aimap(dask.array.ones((4, 1)))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_asynchronous_client_cannot_wait(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    with pytest.raises(RuntimeError, match="cannot wait here; use aimap"):
        model.imap([ONE])


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_odd_inputs(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe(), warmup=ONE)
    assert await rest(model.aimap([])) == []
    assert await rest(model.aimap(iter(()), max_in_flight=1)) == []
    assert values(await rest(model.aimap([ONE], max_in_flight=1))) == [2.0]
    found = await rest(model.aimap(map(row, range(20)), max_in_flight=1))
    assert values(found) == [2.0 * i for i in range(20)]
    shapes = [(1, 3), (2, 3), (0, 3), (1, 5), (4, 2, 2)]
    found = await rest(model.aimap([np.ones(shape) for shape in shapes * 10]))
    assert [result.shape for result in found] == shapes * 10
    # As many as a huge limit allows.
    found = await rest(model.aimap(map(row, range(50)), max_in_flight=10**12))
    assert values(found) == [2.0 * i for i in range(50)]
