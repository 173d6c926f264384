"""Workers that are gone in the middle of a stream."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from distributed import CancelledError, Nanny
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import RetryPolicy, WorkerLost
from tests.cluster.helpers import PATIENCE, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left
from tests.cluster.stream_helpers import Feed, live, read

TWO_WORKERS = [("127.0.0.1", 1)] * 2
PROCESSES: dict[str, Any] = {
    "client": True,
    "nthreads": TWO_WORKERS,
    "Worker": Nanny,
    "timeout": 120,
}


def mortal() -> Any:
    # Pickled by value: worker processes don't import the tests.
    def answer(length: int, dies_at: int = -1) -> Any:
        import os

        for i in range(length):
            if i == dies_at:
                os._exit(1)
            yield i

    return answer


def slow() -> Any:
    def answer(length: int) -> Any:
        import os
        import time

        for i in range(length):
            yield i, os.getpid()
            time.sleep(0.01)

    return answer


async def kill_who_streams(s: Any, nannies: Any) -> str:
    """Kill the process of the one worker that has a stream; return its address."""
    (address,) = engine(s).dispatcher.streams.live.workers()
    (nanny,) = [n for n in nannies if n.worker_address == address]
    await nanny.kill(timeout=5)
    return address


@gen_cluster(**PROCESSES)
async def test_a_worker_that_dies_in_the_middle_ends_the_stream_by_name(c, s, a, b):
    model = await deploy(c, slow())
    stream = model.stream(10_000)
    assert [(await anext(stream))[0] for _ in range(3)] == [0, 1, 2]
    address = await kill_who_streams(s, (a, b))
    found = 3
    with pytest.raises(WorkerLost) as caught:
        async for i, _ in stream:
            assert i == found
            found += 1
    error = caught.value
    assert (error.chunks, error.worker, error.attempts) == (found, address, 1)
    assert f"{found} chunks had been delivered" in str(error)
    assert "resume='replay'" in str(error)
    # What nobody has read is simply run again.
    assert len(await model.submit(5)) == 5
    del stream, error, caught
    await nothing_is_left(s)


@gen_cluster(**PROCESSES)
async def test_a_process_that_is_killed_ends_its_stream_by_name(c, s, a, b):
    """It has no time to say anything, as with no memory left."""
    model = await deploy(c, slow())
    stream = model.stream(10_000)
    first = [await anext(stream) for _ in range(3)]
    (address,) = engine(s).dispatcher.streams.live.workers()
    ((_, pid), *_) = first
    (nanny,) = [n for n in (a, b) if n.pid == pid]
    assert nanny.worker_address == address
    os.kill(pid, signal.SIGKILL)
    found = list(first)
    with pytest.raises(WorkerLost) as caught:
        async for chunk in stream:
            found.append(chunk)
    assert found == [(i, pid) for i in range(len(found))]
    error = caught.value
    assert (error.chunks, error.worker) == (len(found), address)
    assert f"{len(found)} chunks had been delivered" in str(error)
    # Others are answered, by the other one.
    assert [i for i, _ in await read(model.stream(5))] == list(range(5))
    del stream, error, caught
    await nothing_is_left(s)


@gen_cluster(**PROCESSES)
async def test_with_replay_the_stream_goes_on_elsewhere(c, s, a, b):
    model = await deploy(c, slow())
    stream = model.options(resume="replay").stream(200)
    found = [await anext(stream) for _ in range(3)]
    await kill_who_streams(s, (a, b))
    found += await read(stream)
    assert [i for i, _ in found] == list(range(200))
    assert len({process for _, process in found}) == 2
    whole = await stream.future
    assert [i for i, _ in whole] == list(range(200))
    assert (await daskinfer.info(stream.future)).attempts == 2


@gen_cluster(**PROCESSES)
async def test_a_stream_of_which_nothing_was_read_is_run_again(c, s, a, b):
    model = await deploy(c, slow())
    # Nobody reads it, so that nothing was delivered.
    future = model.submit(100)
    await until(lambda: len(engine(s).dispatcher.streams.live) == 1)
    await kill_who_streams(s, (a, b))
    assert [i for i, _ in await future] == list(range(100))


@pytest.mark.parametrize("dies_at", [0, 3])
@gen_cluster(**PROCESSES)
async def test_a_stream_that_kills_its_workers_fails(c, s, a, b, dies_at):
    model = await deploy(c, mortal(), retry=RetryPolicy(max_attempts=2))
    stream = model.options(resume="replay").stream(10, dies_at=dies_at)
    found = []
    with pytest.raises(WorkerLost) as caught:
        async for chunk in stream:
            found.append(chunk)
    # What it gave right before may have died with it.
    assert found == list(range(len(found)))
    assert bool(dies_at) <= len(found) <= dies_at
    assert caught.value.chunks == len(found)
    assert await read(model.stream(4)) == [0, 1, 2, 3]


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_worker_that_leaves_takes_its_streams_with_it(c, s, a, b):
    feed = Feed(is_open=True)
    model = await deploy(c, feed)
    streams = [model.stream(), model.options(resume="replay").stream()]
    for stream in streams:
        assert await anext(stream) == 0
    gone = next(
        w for w in (a, b) if w.address in engine(s).dispatcher.streams.live.workers()
    )
    other = a if gone is b else b
    await gone.close()
    await other.close()
    with pytest.raises(WorkerLost):
        await read(streams[0])
    streams[1].close()
    del streams, stream
    await nothing_is_left(s)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_device_that_breaks_ends_streams_by_name(c, s, a, monkeypatch):
    class Breaks(Feed):
        def _wait(self) -> None:
            super()._wait()
            if self.given == 2:
                raise RuntimeError("the device is gone")

    model = await deploy(c, Breaks(is_open=True))
    runtime: Any = a.plugins["daskinfer-runtime"]
    device = runtime.loader.find("m", "1").device
    monkeypatch.setattr(
        type(device), "is_fatal", lambda self, error: "is gone" in str(error)
    )
    stream = model.stream()
    assert [await anext(stream), await anext(stream)] == [0, 1]
    with pytest.raises(daskinfer.DeviceError, match="2 chunks had been") as caught:
        await anext(stream)
    assert caught.value.chunks == 2
    del stream, caught
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_device_that_breaks_beside_ends_streams_by_name(c, s, a, monkeypatch):
    async def breaks() -> AsyncIterator[int]:
        yield 0
        yield 1
        raise RuntimeError("the device is gone")

    model = await deploy(c, breaks)
    runtime: Any = a.plugins["daskinfer-runtime"]
    device = runtime.loader.find("m", "1").device
    monkeypatch.setattr(
        type(device), "is_fatal", lambda self, error: "is gone" in str(error)
    )
    stream = model.stream()
    assert [await anext(stream), await anext(stream)] == [0, 1]
    with pytest.raises(daskinfer.DeviceError, match="2 chunks had been"):
        await anext(stream)
    del stream
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_retiring_spares_workers_that_stream(c, s, a, b):
    feed = Feed(is_open=True)
    model = await deploy(c, feed)
    stream = model.stream()
    assert await anext(stream) == 0
    (busy,) = engine(s).dispatcher.streams.live.workers()
    for _ in range(3):
        (idle,) = s.workers_to_close(n=1)
        assert idle != busy
    del stream
    await live(a, 0)
    await live(b, 0)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_restarting_the_cluster_ends_streams(c, s, a):
    feed = Feed(is_open=True)
    model = await deploy(c, feed)
    stream = model.stream()
    assert await anext(stream) == 0
    engine(s).restart(s)
    assert not len(engine(s).dispatcher.streams.live)
    await c.cancel([stream._future])
    with pytest.raises(CancelledError):
        await read(stream)
    del stream


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_late_batch_that_begins_streams_is_stopped(c, s, a):
    """Its requests are not wanted any more when it says that they have begun."""
    feed = Feed()
    model = await deploy(c, feed)
    stream = model.stream()
    await until(lambda: feed.begun == 1)
    stream.close()
    await until(lambda: not s.tasks)
    feed.let(2)
    await until(lambda: feed.closed == 1)
    await nothing_is_left(s, a)
    feed.open()
    assert len(ONE) == np.size(ONE)


def read_one(address: str) -> None:
    """Read one chunk of an endless stream, tell so, and wait to be killed."""
    import time

    from distributed import Client

    import daskinfer

    client = Client(address)
    stream = daskinfer.get(client, "m").options(keep=False).stream()
    print(next(stream), flush=True)
    time.sleep(PATIENCE)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=120)
async def test_a_reader_whose_process_is_killed_and_started_anew(c, s, a):
    feed = Feed(is_open=True)
    await deploy(c, feed)
    code = f"from {__name__} import read_one; read_one({s.address!r})"
    for times in (1, 2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"0\n"
            assert len(engine(s).dispatcher.streams.live) == 1
        finally:
            process.kill()
            await process.wait()
        await until(lambda times=times: feed.closed == times)
        await nothing_is_left(s, a)
