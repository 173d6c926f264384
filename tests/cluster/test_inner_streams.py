"""A model that reads the streams of another: as everywhere, on the device it has."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import DeadlineExceeded
from tests.cluster.helpers import Local, until
from tests.cluster.scheduling_helpers import deploy, engine, nothing_is_left
from tests.cluster.stream_helpers import Feed

ONE_WORKER = [("127.0.0.1", 1)]


def count(n: int) -> Iterator[int]:
    yield from range(n)


class Awaiting(Local):
    """Gives numbers after awaiting something each time; knows whether it was left."""

    def __init__(self) -> None:
        self.left = 0

    async def __call__(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                await asyncio.sleep(0)
                yield i
        finally:
            # It may still wait for something as it is closed.
            await asyncio.sleep(0)
            self.left += 1


async def inside(client: Any, function: Callable[[], Any]) -> Any:
    """What a function returns that is called in a model."""
    model = await deploy(client, lambda _: [function()], "outer", batch_dim=None)
    return await model.submit(0)


@pytest.mark.parametrize("how", ["with", "close", "leave", "async with", "aclosing"])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_who_leaves_has_the_model_stop(c, s, a, how):
    feed = Feed(is_open=True)
    inner = await deploy(c, feed, "inner")

    async def within(stream: Any) -> list[int]:
        manager = contextlib.aclosing(stream) if how == "aclosing" else stream
        async with manager as chunks:
            async for chunk in chunks:
                return [chunk]
        raise AssertionError("it has no end")

    def read() -> Any:
        stream = inner.stream(3)
        if how == "with":
            with stream as chunks:
                first = [next(chunks)]
        elif how == "close":
            first = [next(stream)]
            stream.close()
            stream.close()
        elif how == "leave":
            for chunk in stream:
                first = [chunk]
                break
            del stream
            return first, [], feed.closed
        else:
            first = asyncio.run(within(stream))
        return first, list(stream), feed.closed

    assert await inside(c, read) == ([3], [], 1)
    assert feed.given == 1
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_options_mean_what_they_mean_elsewhere(c, s, a):
    inner = await deploy(c, count, "inner")
    endless = await deploy(c, Feed(is_open=True), "endless")

    def refused(act: Callable[[], object]) -> tuple[type[Exception], str]:
        try:
            act()
        except Exception as error:
            return type(error), str(error)
        raise AssertionError("it was not refused")

    def read() -> Any:
        assert inner(4) == list(inner.options(keep=False).stream(4)) == [0, 1, 2, 3]
        assert inner.options(combine=sum)(4) == 6
        assert inner.options(keep=False)(4) is None
        assert list(inner.options(combine=sum).stream(3)) == [0, 1, 2]
        late = endless.options(timeout="20ms")
        return [
            refused(lambda: inner.options(key="k").stream(3)),
            refused(lambda: inner.stream(3).future),
            refused(lambda: list(late.stream())),
            refused(lambda: late()),
        ]

    keyed, future, *late = await inside(c, read)
    assert keyed[0] is ValueError and "key= names a result" in keyed[1]
    assert future[0] is RuntimeError and "call the model" in future[1]
    for kind, said in late:
        assert kind is DeadlineExceeded
        assert "'endless'" in said and "0.02 s" in said
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_asynchronous_generators_are_read_too(c, s, a):
    awaiting = Awaiting()
    inner = await deploy(c, awaiting, "inner")

    def read() -> Any:
        whole = inner(3), list(inner.stream(3))
        with inner.stream(3) as chunks:
            first = next(chunks)
        return whole, first, list(chunks), awaiting.left

    assert await inside(c, read) == (([0, 1, 2], [0, 1, 2]), 0, [], 3)
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_errors_come_after_the_chunks_before_them(c, s, a):
    def breaks(n: int) -> Iterator[int]:
        yield from range(n)
        raise ArithmeticError("a bad step")

    inner = await deploy(c, breaks, "inner")
    plain = await deploy(c, lambda n: n, "plain")
    assert await plain.submit(1) == 1

    def read() -> Any:
        found = []
        with pytest.raises(ArithmeticError, match="a bad step"):
            for chunk in inner.stream(3):
                found.append(chunk)
        with pytest.raises(TypeError, match="does not answer piece by piece"):
            plain.stream(1)
        return found

    assert await inside(c, read) == [0, 1, 2]


class Slow(Local):
    """A model that is built as soon as a test lets it."""

    def __init__(self) -> None:
        self.builder = threading.Event()
        self.is_building = False

    def build(self) -> Any:
        self.is_building = True
        assert self.builder.wait(30)
        return count


def build(slow: Slow) -> Any:
    return slow.build()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_one_that_is_loaded_meanwhile_is_read_here(c, s, a):
    slow = Slow()
    outer = await deploy(c, lambda n: list(daskinfer.Model("inner").stream(n)), "outer")
    await daskinfer.deploy(
        c,
        factory=f"{__name__}:build",
        factory_kwargs={"slow": slow},
        name="inner",
        wait=False,
    )
    await until(lambda: slow.is_building)
    answer = outer.submit(3)
    # Its own, and the one that it waits for.
    await until(lambda: len(engine(s).requests) == 2)
    slow.builder.set()
    assert await answer == [0, 1, 2]
    del answer
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_callers_without_a_device_read_as_any_client(c, s, a):
    inner = await deploy(c, Feed(length=3, is_open=True), "inner")

    async def outer(n: int) -> AsyncIterator[int]:
        async with inner.options(keep=False, priority=3).stream(n) as stream:
            async for chunk in stream:
                yield chunk

    model = await deploy(c, outer, "outer")
    assert [chunk async for chunk in model.stream(5)] == [5, 6, 7]
    await nothing_is_left(s, a)
