"""Answers that come piece by piece: models, readers, and the whole."""

from __future__ import annotations

import asyncio
import functools
import operator
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import dask
import numpy as np
import pytest
import torch
from distributed import CancelledError, Client, LocalCluster, as_completed, wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import Step, StreamPolicy
from tests.cluster.helpers import Local, Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left
from tests.cluster.stream_helpers import Feed, live, read, streams_of, told

ONE_WORKER = [("127.0.0.1", 1)]


def count(n: int) -> Iterator[int]:
    yield from range(n)


def total(chunks: list[int]) -> int:
    return functools.reduce(operator.add, chunks, 0)


# Models


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_generator_is_read_chunk_by_chunk(c, s, a):
    model = await deploy(c, count)
    assert engine(s).dispatcher.lines["m", "1"].kind == "stream"
    assert await read(model.stream(5)) == [0, 1, 2, 3, 4]
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_no_chunks_are_a_valid_stream(c, s, a):
    model = await deploy(c, count)
    stream = model.stream(0)
    assert await read(stream) == []
    # The end is there as often as it is asked for.
    assert await read(stream) == []
    assert await model.submit(0) == []


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_iterator_of_a_plain_function_is_streamed(c, s, a):
    model = await deploy(c, lambda n: iter(range(n)))
    assert await read(model.stream(3)) == [0, 1, 2]
    assert await model.submit(3) == [0, 1, 2]
    assert engine(s).dispatcher.lines["m", "1"].kind == "stream"


class Speaker(torch.nn.Module):
    """A module that is asked through its ``stream``, whatever else it can do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("never called")

    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for i in range(3):
            assert torch.is_inference_mode_enabled()
            yield x * i


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_module_with_a_stream_method_answers_what_it_is_asked_in(c, s, a):
    model = await deploy(c, Speaker())
    chunks = await read(model.stream(np.ones((1, 2))))
    assert [chunk.tolist() for chunk in chunks] == [[[0, 0]], [[1, 1]], [[2, 2]]]
    assert all(isinstance(chunk, np.ndarray) for chunk in chunks)
    (first, *_) = await read(model.stream(torch.ones(1, 2)))
    assert isinstance(first, torch.Tensor)
    assert not first.is_inference()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_asynchronous_generator_is_streamed_beside_the_device(c, s, a):
    class Waits(Local):
        async def __call__(self, n: int) -> Any:
            for i in range(n):
                yield i
                # On the worker's own loop nothing would come while this waits.
                await asyncio.sleep(0.001)

    model = await deploy(c, Waits())
    assert engine(s).dispatcher.lines["m", "1"].kind == "async-stream"
    streams = [model.stream(i) for i in range(20)]
    assert await asyncio.gather(*map(read, streams)) == [
        list(range(i)) for i in range(20)
    ]
    streams.clear()
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_asynchronous_generator_that_waits_does_not_keep_the_device(c, s, a):
    class Waits(Local):
        def __init__(self) -> None:
            self.closed = 0

        async def __call__(self, n: int) -> Any:
            try:
                yield n
                await asyncio.Event().wait()
            except (asyncio.CancelledError, GeneratorExit):
                self.closed += 1
                raise

    waits = Waits()
    model = await deploy(c, waits)
    other = await deploy(c, lambda x: x * 2, name="other")
    stream = model.stream(7)
    assert await anext(stream) == 7
    assert (await other.submit(ONE)).item() == 2
    # It is left in the middle of a wait that would never end.
    stream.close()
    await until(lambda: waits.closed == 1)
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_thread_of_asynchronous_generators_goes_with_their_model(c, s, a):
    class Numbers(Local):
        threads: ClassVar[set[threading.Thread]] = set()

        async def __call__(self, n: int) -> AsyncIterator[int]:
            for i in range(n):
                self.threads.add(threading.current_thread())
                yield i

    model = await deploy(c, Numbers())
    for _ in range(2):
        assert await read(model.stream(3)) == [0, 1, 2]
    # What a model keeps may belong to its event loop.
    (thread,) = Numbers.threads
    assert thread.is_alive()
    await model.undeploy()
    await until(lambda: not thread.is_alive())


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_model_that_gives_one_result_cannot_be_streamed(c, s, a):
    model = await deploy(c, lambda x: x * 2)
    with pytest.raises(TypeError, match="returned a value of type ndarray"):
        await read(model.stream(ONE))
    assert (await model.submit(ONE)).item() == 2
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_it_is_warmed_up_by_its_first_step(c, s, a):
    feed = Feed(is_open=True)
    model = await deploy(c, feed, warmup=(1,), max_batch_size=1)
    assert feed.given
    assert feed.closed == feed.begun
    line = engine(s).dispatcher.lines["m", "1"]
    assert list(line.latency.sizes(line.device_class)) == [1]
    del model


# What chunks are


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_chunks_keep_container_dtype_and_bits(c, s, a):
    chunks = [
        b"0123456789",
        {"a": {"b": [torch.ones(2, dtype=torch.bfloat16)]}, "n": 1},
        np.arange(50 * 2**20 // 8).reshape(1, -1),
        np.zeros((0, 3), "f4"),
        None,
        "end",
    ]
    model = await deploy(c, lambda: iter(chunks))
    found = await read(model.stream())
    assert found[0] == chunks[0]
    assert found[1]["a"]["b"][0].dtype is torch.bfloat16
    assert torch.equal(found[1]["a"]["b"][0], chunks[1]["a"]["b"][0])
    assert np.array_equal(found[2], chunks[2])
    found[2][0, 0] = 5
    assert (found[3].shape, found[3].dtype) == ((0, 3), np.dtype("f4"))
    assert found[4:] == [None, "end"]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_chunk_that_cannot_be_pickled_fails_its_stream_after_the_others(
    c, s, a
):
    class Stubborn:
        def __reduce__(self) -> Any:
            raise ValueError("not this one")

    def model() -> Iterator[Any]:
        yield 1
        yield Stubborn()
        yield 3

    model = await deploy(c, model)
    stream = model.stream()
    assert await anext(stream) == 1
    with pytest.raises(ValueError, match="not this one"):
        await anext(stream)
    del stream
    await nothing_is_left(s, a)


# The whole


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_future_of_the_whole_is_dasks(c, s, a):
    model = await deploy(c, count)
    stream = model.stream(4)
    future = stream.future
    assert await future == [0, 1, 2, 3]
    assert await read(stream) == [0, 1, 2, 3]
    assert await c.submit(model, 4) == [0, 1, 2, 3]
    assert await model.submit(4) == [0, 1, 2, 3]
    assert await model(4) == [0, 1, 2, 3]
    assert await c.submit(sum, model.submit(4)) == 6
    info = await daskinfer.info(future)
    assert (info.chunks, info.attempts) == (4, 1)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_user_combines_the_chunks(c, s, a):
    model = await deploy(c, count)
    bound = model.options(combine=lambda chunks: ("all", total(chunks)))
    stream = bound.stream(5)
    assert await read(stream) == [0, 1, 2, 3, 4]
    assert await stream.future == ("all", 10)
    assert await bound.submit(5) == ("all", 10)
    assert await asyncio.gather(*bound.map([1, 2])) == [("all", 0), ("all", 1)]


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_what_is_lost_is_combined_again(c, s, a, b):
    feed = Feed(is_open=True, length=5)
    model = await deploy(c, feed)
    future = model.options(combine=total).stream().future
    assert await future == 10
    (holder,) = (w for w in (a, b) if future.key in w.data)
    await holder.close()
    doubled = c.submit(lambda whole: whole * 2, future)
    assert await doubled == 20
    assert feed.begun == 2


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_error_of_combine_comes_after_the_chunks(c, s, a):
    model = await deploy(c, count)
    stream = model.options(combine=lambda chunks: 1 / 0).stream(2)
    assert [await anext(stream), await anext(stream)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        await anext(stream)
    del stream
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_nothing_is_kept_of_an_endless_stream(c, s, a):
    feed = Feed(is_open=True)
    model = await deploy(c, feed)
    stream = model.options(keep=False).stream()
    for i in range(2000):
        assert await anext(stream) == i
    ((run,),) = streams_of(a)._runs.values()
    assert [live._kept for live in run.lives.values()] == [[]]
    stream.close()
    await until(lambda: feed.closed == 1)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_not_kept_has_no_result(c, s, a):
    model = await deploy(c, count)
    stream = model.options(keep=False).stream(3)
    assert await read(stream) == [0, 1, 2]
    assert await stream.future is None


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_options_are_refused_at_once(c, s, a):
    model = await deploy(c, count)
    for wrong, error, words in [
        ({"keep": 1}, TypeError, "keep must be True or False"),
        ({"combine": 3}, TypeError, "combine must be a function"),
        ({"combine": sum, "keep": False}, ValueError, "not kept with keep=False"),
        ({"resume": "always"}, ValueError, "resume must be None or 'replay'"),
    ]:
        with pytest.raises(error, match=words):
            model.options(**wrong)
    with pytest.raises(ValueError, match="key= names a result"):
        model.options(key="k").stream(1)
    with pytest.raises(TypeError, match="streaming must be a StreamPolicy"):
        await deploy(c, count, "other", streaming=4)
    with pytest.raises(ValueError, match="max_streams must be at least 1"):
        StreamPolicy(max_streams=0)
    with pytest.raises(RuntimeError, match="async for"):
        next(model.stream(1))


# Batches


class Batched(Local):
    """Counts each row up to its own number; notes how many rows it was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: np.ndarray) -> Iterator[Step]:
        self.rows.append(len(x))
        live, i = x, 0
        while len(live):
            i += 1
            done = live[:, 0] <= i
            yield Step({"i": np.full((len(live), 1), i), "of": live}, done)
            live = live[~done]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_streams_are_batched_and_each_ends_on_its_own(c, s, a):
    batched, held = Batched(), Probe(is_open=False)
    model = await deploy(c, batched)
    other = await deploy(c, held, name="other")
    ahead = other.submit(ONE)
    await held.entered()
    lengths = [3, 1, 4, 1, 5]
    streams = [model.stream(np.array([[n]])) for n in lengths]
    await until(lambda: len(engine(s).requests) == 6)
    held.open()
    found = await asyncio.gather(*map(read, streams))
    assert [[x["i"].item() for x in chunks] for chunks in found] == [
        list(range(1, n + 1)) for n in lengths
    ]
    assert all(
        x["of"].item() == n for n, f in zip(lengths, found, strict=True) for x in f
    )
    assert max(batched.rows) > 1
    await ahead


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_padding_is_not_given_to_anybody(c, s, a):
    def doubling(x: np.ndarray) -> Iterator[np.ndarray]:
        assert len(x) == 4
        yield x
        yield x * 2

    model = await deploy(c, doubling, allowed_batch_sizes=[4])
    chunks = await read(model.stream(np.ones((3, 1))))
    assert [chunk.ravel().tolist() for chunk in chunks] == [[1, 1, 1], [2, 2, 2]]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_request_that_is_too_large_for_a_pass_is_one_stream(c, s, a):
    model = await deploy(c, Batched(), max_batch_size=2)
    chunks = await read(model.stream(np.array([[1], [3], [2], [2], [1]])))
    assert [chunk["of"].ravel().tolist() for chunk in chunks] == [
        [1, 3, 2, 2, 1],
        [3, 2, 2],
        [3],
    ]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_who_cannot_begin_fails_alone(c, s, a):
    held = Probe(is_open=False)

    def picky(x: np.ndarray) -> Iterator[np.ndarray]:
        if (x < 0).any():
            raise ValueError("negative")
        yield x
        yield x + 1

    model = await deploy(c, picky)
    other = await deploy(c, held, name="other")
    ahead = other.submit(ONE)
    await held.entered()
    streams = [model.stream(np.array([[n]])) for n in (1, -1, 2)]
    await until(lambda: len(engine(s).requests) == 4)
    held.open()
    first, bad, last = await asyncio.gather(*map(read, streams), return_exceptions=True)
    assert [x.item() for x in first] == [1, 2]
    assert [x.item() for x in last] == [2, 3]
    assert isinstance(bad, ValueError)
    assert "Raised in deployment 'm'" in bad.__notes__[0]
    await ahead


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_slow_reader_does_not_hold_up_who_shares_its_batch(c, s, a):
    held = Probe(is_open=False)

    def long(x: np.ndarray) -> Iterator[np.ndarray]:
        for i in range(2000):
            yield x + i

    model = await deploy(c, long)
    other = await deploy(c, held, name="other")
    ahead = other.submit(ONE)
    await held.entered()
    slow, fast = model.stream(ONE), model.stream(ONE)
    await until(lambda: len(engine(s).requests) == 3)
    held.open()
    assert len(await read(fast)) == 2000
    assert (await anext(slow)).item() == 1
    assert [x.item() for x in await read(slow)] == list(range(2, 2001))
    await ahead


# Errors


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_error_comes_after_the_chunks_before_it(c, s, a):
    def failing(n: int) -> Iterator[int]:
        yield from range(n)
        raise KeyError("in the middle")

    model = await deploy(c, failing)
    stream = model.stream(300)
    found = []
    with pytest.raises(KeyError, match="in the middle") as caught:
        async for chunk in stream:
            found.append(chunk)
    assert found == list(range(300))
    assert "Raised in deployment 'm'" in caught.value.__notes__[0]
    with pytest.raises(KeyError):
        await model.submit(2)
    assert (await model.status()).failures == 2
    del stream, caught
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_retries_are_for_streams_of_which_nothing_was_read(c, s, a):
    class Flaky(Local):
        def __init__(self, after: int) -> None:
            self.after, self.calls = after, 0

        def __call__(self) -> Iterator[int]:
            self.calls += 1
            for i in range(3):
                if self.calls == 1 and i == self.after:
                    raise ArithmeticError("at first")
                yield i

    at_once, later = Flaky(0), Flaky(1)
    model = await deploy(c, at_once)
    assert await read(model.options(retries=1).stream()) == [0, 1, 2]
    model = await deploy(c, later, "later")
    with pytest.raises(ArithmeticError):
        await read(model.options(retries=1).stream())
    assert later.calls == 1
    # One that always gives the same goes on behind what was read.
    later.calls = 0
    again = model.options(retries=1, resume="replay")
    assert await read(again.stream()) == [0, 1, 2]
    assert later.calls == 2


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_model_that_stalls_ends_by_name(c, s, a):
    feed = Feed()
    model = await deploy(c, feed, streaming=StreamPolicy(idle_timeout="100ms"))
    feed.let(2)
    stream = model.stream()
    assert [await anext(stream), await anext(stream)] == [0, 1]
    with pytest.raises(daskinfer.StreamStalled, match=r"no chunk for 0\.1 s") as caught:
        await anext(stream)
    assert caught.value.chunks == 2
    assert isinstance(caught.value, TimeoutError)
    feed.let()
    await until(lambda: feed.closed == 1)
    del stream, caught
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_reader_that_is_slow_is_no_model_that_stalls(c, s, a):
    feed = Feed(is_open=True, length=3000)
    policy = StreamPolicy(idle_timeout="50ms")
    model = await deploy(c, feed, streaming=policy)
    stream = model.stream()
    assert await anext(stream) == 0
    await until(lambda: feed.given >= 1024)
    await asyncio.sleep(0.2)
    assert await read(stream) == list(range(1, 3000))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_deadline_ends_a_stream_at_its_next_step(c, s, a):
    feed = Feed(is_open=True)
    model = await deploy(c, feed)
    stream = model.options(timeout="300ms").stream()
    with pytest.raises(daskinfer.DeadlineExceeded, match="while it streamed") as caught:
        await read(stream)
    assert caught.value.chunks > 0
    await until(lambda: feed.closed == 1)
    del stream, caught
    await nothing_is_left(s, a)


class Unsized:
    """A chunk whose size cannot be told."""

    def __sizeof__(self) -> int:
        raise ArithmeticError("it has no size")


@gen_cluster(client=True, nthreads=ONE_WORKER)
@pytest.mark.parametrize("good", [0, 2])
async def test_a_chunk_that_cannot_be_sized_fails_its_stream_alone(c, s, a, good):
    class Mixed:
        def __call__(self, bad: bool) -> Iterator[Any]:
            yield from range(good)
            yield Unsized() if bad else good
            yield from range(good + 1, 600)

    model = await deploy(c, Mixed(), max_batch_size=8)
    stream, other = model.stream(True), model.stream(False)
    assert [await anext(stream) for _ in range(good)] == list(range(good))
    with pytest.raises(ArithmeticError, match="it has no size"):
        await anext(stream)
    assert await read(other) == list(range(600))
    del stream, other
    await nothing_is_left(s, a)


# Readers


@gen_cluster(client=True, nthreads=ONE_WORKER)
@pytest.mark.parametrize("how", ["leave", "close", "with", "cancel", "forget"])
async def test_who_leaves_has_the_model_stop(c, s, a, how):
    feed = Feed()
    model = await deploy(c, feed)
    stream = model.stream()
    feed.let(3)
    if how == "leave":
        async for chunk in stream:
            if chunk == 2:
                break
        del stream
    elif how == "close":
        assert await anext(stream) == 0
        stream.close()
        stream.close()
        assert await read(stream) == []
    elif how == "with":
        async with stream:
            assert await anext(stream) == 0
    elif how == "cancel":
        assert await anext(stream) == 0
        await stream._future.cancel()
        with pytest.raises(CancelledError):
            await read(stream)
    else:
        await live(a, 1)
        del stream
    # Within one step: it is in the fourth.
    await told(a)
    feed.let()
    await until(lambda: feed.closed == 1)
    assert feed.given <= 4
    stream = None
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
@pytest.mark.parametrize("at", [0, 1, 4])
async def test_cancelling_at_the_first_a_middle_and_the_last_chunk(c, s, a, at):
    feed = Feed(length=5)
    model = await deploy(c, feed)
    stream = model.stream()
    for i in range(at + 1):
        feed.let()
        assert await anext(stream) == i
    future = stream.future
    await future.cancel()
    await told(a)
    feed.let()
    await until(lambda: feed.closed == 1 or feed.given == 5)
    with pytest.raises(CancelledError):
        await anext(stream)
    del stream, future
    await nothing_is_left(s, a)
    assert feed.given <= at + 2


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_future_that_was_taken_goes_on_when_its_reader_leaves(c, s, a):
    feed = Feed(length=3)
    model = await deploy(c, feed)
    stream = model.stream()
    future = stream.future
    feed.let()
    assert await anext(stream) == 0
    stream.close()
    feed.open()
    assert await future == [0, 1, 2]
    assert feed.closed == 0


@gen_cluster(client=True, nthreads=ONE_WORKER)
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_future_that_is_taken_before_the_first_chunk(c, s, a, leaves):
    """The batch is on its way, and says that the chunks are read."""
    feed = Feed(length=20)
    model = await deploy(c, feed)
    with dask.config.set({"daskinfer.streaming.window-chunks": 4}):
        stream = model.stream()
    await until(lambda: feed.begun == 1)
    future = stream.future
    if leaves:
        stream.close()
    (request,) = engine(s).requests.values()
    await until(lambda: request.stream["nbytes"] > 2**60)
    await until(lambda: request.stream["read"] is not leaves)
    feed.open()
    assert await future == list(range(20))
    assert await read(stream) == ([] if leaves else list(range(20)))
    del stream, future
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_who_waits_for_the_whole_need_not_read(c, s, a):
    model = await deploy(c, count)
    stream = model.stream(5000)
    assert await stream.future == list(range(5000))
    assert await read(stream) == list(range(5000))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_client_that_dies_stops_its_streams(c, s, a):
    feed = Feed(is_open=True)
    await deploy(c, feed)
    other = await Client(s.address, asynchronous=True)
    model = await daskinfer.get(other, "m")
    stream = model.stream()
    assert await anext(stream) == 0
    other.scheduler_comm.comm.abort()
    await until(lambda: feed.closed == 1)
    await nothing_is_left(s, a)
    await other.close()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_client_that_closes_ends_its_streams(c, s, a):
    feed = Feed(is_open=True)
    await deploy(c, feed)
    async with Client(s.address, asynchronous=True) as other:
        model = await daskinfer.get(other, "m")
        stream = model.stream()
        assert await anext(stream) == 0
    with pytest.raises((CancelledError, daskinfer.SchedulerLost)):
        await read(stream)
    await until(lambda: feed.closed == 1)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_tasks_on_workers_read_streams(c, s, a):
    model = await deploy(c, count)

    def task(model: Any) -> list[int]:
        return [chunk * 2 for chunk in model.stream(300)]

    assert await c.submit(task, model) == [i * 2 for i in range(300)]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_model_reads_the_stream_of_another(c, s, a):
    inner = await deploy(c, count, "inner")

    def outer(n: int) -> Iterator[int]:
        for chunk in inner.stream(n):
            yield chunk + 100

    model = await deploy(c, outer, "outer")
    assert await read(model.stream(300)) == list(range(100, 400))
    whole = await deploy(c, lambda n: inner(n), "whole")
    assert await whole.submit(3) == [0, 1, 2]


def test_a_script_reads_streams(loop: Any) -> None:
    with (
        LocalCluster(
            1, processes=False, threads_per_worker=1, dashboard_address=":0", loop=loop
        ) as cluster,
        Client(cluster) as client,
    ):
        model = daskinfer.deploy(client, count, name="m")
        assert list(model.stream(1000)) == list(range(1000))
        with model.stream(10) as stream:
            assert next(stream) == 0
            assert next(stream) == 1
        assert list(stream) == []
        with pytest.raises(TypeError, match="'str' object cannot be"):
            list(model.stream("three"))
        futures = [model.stream(n).future for n in range(5)]
        assert sorted(f.result()[-1:] for f in as_completed(futures)) == sorted(
            [list(range(n))[-1:] for n in range(5)]
        )

        async def elsewhere() -> list[int]:
            return [chunk async for chunk in model.stream(1000)]

        # On an event loop that is not the client's.
        assert asyncio.run(elsewhere()) == list(range(1000))
        wait(futures)


# Room


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_worker_has_no_more_streams_than_it_may(c, s, a):
    # Each gives as much as may be unread, and waits for its reader then.
    feed = Feed(is_open=True)
    model = await deploy(c, feed, streaming=StreamPolicy(max_streams=2))
    streams = [model.stream(i * 1000) for i in range(3)]
    await live(a, 2)
    await until(lambda: len(engine(s).dispatcher.lines["m", "1"].queue) == 1)
    assert [await anext(streams[0]), await anext(streams[1])] == [0, 1000]
    assert feed.begun == 2
    streams[0].close()
    assert await anext(streams[2]) == 2000
    assert feed.begun == 3
    streams.clear()
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_the_worker_with_the_fewest_streams_gets_the_next(c, s, a, b):
    feed = Feed(is_open=True)
    model = await deploy(c, feed)
    streams = []
    for _ in range(6):
        streams.append(model.stream())
        await anext(streams[-1])
    line = engine(s).dispatcher.lines["m", "1"]
    assert dict(line.streaming) == {a.address: 3, b.address: 3}
    streams.clear()
    await nothing_is_left(s, a, b)
    assert not +line.streaming
    assert not +line.begins


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_batches_of_other_models_come_between_the_steps(c, s, a):
    feed = Feed(is_open=True)
    model = await deploy(c, feed)
    other = await deploy(c, lambda x: x * 2, name="other")
    stream = model.stream()
    assert await anext(stream) == 0
    # As the reader takes all it gets, the device is never idle.
    reading = asyncio.create_task(read(stream))
    for _ in range(20):
        assert (await other.submit(ONE)).item() == 2
    assert not reading.done()
    reading.cancel()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_undeploying_lets_streams_end_but_for_endless_ones(c, s, a):
    feed = Feed(length=3000, is_open=True)
    model = await deploy(c, feed)
    with_end, endless = model.stream(), model.options(keep=False).stream()
    assert (await anext(with_end), await anext(endless)) == (0, 0)
    undeploying = asyncio.create_task(_undeploy(model))
    with pytest.raises(daskinfer.UnknownDeployment, match="while it streamed"):
        await read(endless)
    assert not undeploying.done()
    assert await read(with_end) == list(range(1, 3000))
    await undeploying
    assert feed.closed == 1


async def _undeploy(model: Any) -> None:
    await model.undeploy()
