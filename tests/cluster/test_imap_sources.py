"""Inputs that are read by coroutines, and those of Dask bags."""

from __future__ import annotations

import asyncio
import gc
import itertools
import operator
from collections.abc import AsyncIterator
from typing import Any

import dask
import dask.bag
import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.imap_helpers import (
    ONE_WORKER,
    TWO_WORKERS,
    Source,
    first,
    reading_threads,
    rest,
    row,
    values,
)
from tests.cluster.scheduling_helpers import ONE, deploy, nothing_is_left

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
