"""Loops over results that are left before the end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.imap_helpers import (
    ONE_WORKER,
    TWO_WORKERS,
    Source,
    orders,
    reading_threads,
    rest,
    row,
    values,
)
from tests.cluster.scheduling_helpers import ONE, deploy, nothing_is_left


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
