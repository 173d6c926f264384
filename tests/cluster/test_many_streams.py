"""Very many streams, slow readers, and what is left of them."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed.utils_test import gen_cluster

from daskinfer import StreamPolicy
from tests.cluster.helpers import until
from tests.cluster.scheduling_helpers import deploy, engine, nothing_is_left
from tests.cluster.stream_helpers import Feed, live, read, streams_of

STREAMS = 1000


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=250)
async def test_of_many_streams_half_abandoned_nothing_is_left(c, s, a, b):
    feed = Feed(length=5, is_open=True)
    model = await deploy(c, feed, streaming=StreamPolicy(max_streams=100))

    async def use(number: int) -> None:
        stream = model.stream(number * 10)
        if number % 2:
            assert await anext(stream) == number * 10
            return
        assert await read(stream) == [number * 10 + i for i in range(5)]

    await asyncio.gather(*map(use, range(STREAMS)))
    await nothing_is_left(s, a, b)
    dispatcher = engine(s).dispatcher
    line = dispatcher.lines["m", "1"]
    assert not len(dispatcher.streams.live)
    assert not dispatcher.streams._unwanted
    assert not +line.streaming
    assert not +line.begins
    assert not line.in_flight
    assert streams_of(a).count == streams_of(b).count == 0
    # No topic of Dask's, which would never be freed.
    assert not [topic for topic in s._broker._topics if "stream" in str(topic)]
    outcomes = line.figures.measures.streams.outcomes
    assert outcomes.total() == STREAMS
    assert outcomes["ended"] >= STREAMS / 2


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=120)
async def test_a_reader_that_sleeps_grows_no_memory_and_slows_nobody(c, s, a):
    kilobyte = bytes(1024)
    feed = Feed(is_open=True)

    def heavy(start: int) -> Any:
        for _ in feed(start):
            yield kilobyte * 16

    model = await deploy(c, heavy)
    slow = model.options(keep=False).stream(0)
    await anext(slow)
    await live(a, 1)
    ((run,),) = streams_of(a)._runs.values()
    (stream,) = run.lives.values()
    await until(lambda: stream.paused)
    given = feed.given
    # Others go on, at their readers' pace.
    for start in range(20):
        other = model.options(keep=False).stream(start)
        for _ in range(100):
            await anext(other)
        other.close()
    await live(a, 1)
    inbox = slow._state.inbox
    unread = sum(part.nbytes for part in inbox._parts)
    assert unread <= 2**20 + 16 * 1024
    # On the worker, no more than what a single turn has given beyond that.
    waiting = sum(size for _, size in stream._unsent)
    assert waiting <= 64 * 2**20
    assert stream.count <= given
    assert run.paused == {stream.key}
    sizes = [len(chunk) for chunk in [await anext(slow) for _ in range(500)]]
    assert sizes == [16 * 1024] * 500
    assert stream.count > 500
