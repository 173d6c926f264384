"""Models that advance step by step, in a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest
import torch
from distributed import Nanny, Worker, get_worker
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import (
    DeadlineExceeded,
    InferenceError,
    StreamPolicy,
    StreamStalled,
    WorkerLost,
)
from tests.cluster.helpers import Local, until
from tests.cluster.scheduling_helpers import deploy, nothing_is_left
from tests.cluster.stream_helpers import streams_of
from tests.worker.step_models import BAD_STEP, Attention, Recurrent, recurrent_alone

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2


async def read(stream: Any) -> list[int]:
    return [chunk.item() async for chunk in stream]


def request(prompt: list[int], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([prompt]), torch.tensor([steps])


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_each_is_told_what_the_model_says_alone(c, s, a, b):
    model = await deploy(c, Recurrent(), name="recurrent")
    cached = await deploy(c, Attention(slots=4), name="attention")
    wanted = [([1 + n % 7, n % 3], 1 + n % 11) for n in range(30)]
    streams = [model.stream(*request(*about)) for about in wanted]
    others = [cached.stream(*request(*about)) for about in wanted]
    said = await asyncio.gather(*map(read, streams), *map(read, others))
    alone = Recurrent(), Attention(slots=1)
    assert said[:30] == [recurrent_alone(alone[0], *about) for about in wanted]
    assert said[30:] == [alone[1].alone(*about) for about in wanted]
    del streams, others
    await nothing_is_left(s, a, b)


class Gated:
    """Counts down from its input; each step waits for the test to let it."""

    def start(self, x: Any) -> dict[str, Any]:
        return {"left": x}

    def step(self, state: dict[str, Any]) -> Any:
        GATE.acquire()
        ROWS.append(state["left"].tolist())
        state["left"] = state["left"] - 1
        return state["left"], state["left"] <= 0


GATE = threading.Semaphore(0)
#: What was stepped together.
ROWS: list[list[int]] = []


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    ROWS.clear()
    yield
    while GATE.acquire(blocking=False):
        pass


def counting(n: int) -> np.ndarray:
    return np.array([n])


def running(worker: Worker) -> int:
    """How many requests step on a worker, or wait there for their first step."""
    runtime: Any = worker.plugins["daskinfer-runtime"]
    return int(runtime.streams.count)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_short_one_that_comes_later_is_answered_before_the_long(c, s, a):
    model = await deploy(c, Gated())
    long = model.submit(counting(500))
    GATE.release(3)
    await until(lambda: len(ROWS) == 3)
    short = model.submit(counting(2))
    await until(lambda: s.plugins["daskinfer"].dispatcher.streams.live)
    GATE.release(100)
    assert [chunk.item() for chunk in await short] == [1, 0]
    assert long.status == "pending"
    # They were in the same steps.
    assert any(len(rows) == 2 for rows in ROWS)
    GATE.release(500)
    assert len(await long) == 500
    del long, short
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_who_is_cancelled_is_not_in_the_next_step(c, s, a):
    model = await deploy(c, Gated())
    doomed, other = model.submit(counting(900)), model.submit(counting(5))
    GATE.release(2)
    await until(lambda: len(ROWS) >= 2)
    key = doomed.key
    await doomed.cancel()
    await until(lambda: key not in s.tasks)
    GATE.release(30)
    assert [chunk.item() for chunk in await other] == [4, 3, 2, 1, 0]
    # One step was under way, and knew nothing of it.
    assert sum(max(rows) > 5 for rows in ROWS) <= 4
    del doomed, other
    await nothing_is_left(s, a)
    assert not running(a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_who_is_cancelled_before_its_first_step_is_in_none(c, s, a):
    model = await deploy(c, Gated())
    other = model.submit(counting(5))
    GATE.release(1)
    await until(lambda: len(ROWS) == 1)
    # A step is under way for as long as nothing is released.
    fails = model.submit(np.array(["no number"]))
    doomed = model.submit(counting(900))
    await until(lambda: running(a) == 3)
    for future in (doomed, fails):
        await future.cancel()
    await until(lambda: len(s.tasks) == 1)
    (run,) = streams_of(a)._joined.values()
    lives = list(run.lives.values())
    await until(lambda: sum(live.dropped for live in lives) == 2)
    GATE.release(100)
    assert [chunk.item() for chunk in await other] == [4, 3, 2, 1, 0]
    assert max(map(max, ROWS)) <= 5
    del doomed, fails, other, future
    await nothing_is_left(s, a)
    assert not running(a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_deadline_ends_it_at_the_next_step(c, s, a):
    model = await deploy(c, Gated())
    late = model.options(timeout="300ms").submit(counting(900))
    GATE.release(2)
    await until(lambda: len(ROWS) == 2)
    with pytest.raises(DeadlineExceeded):
        await late
    GATE.release(5)
    await until(lambda: not running(a))
    assert len(ROWS) <= 3
    del late
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_bad_one_fails_alone_after_what_it_was_told(c, s, a):
    model = await deploy(c, Recurrent())
    good = [model.stream(*request([n, 3], 6)) for n in range(5)]
    bad = model.stream(*request([BAD_STEP, 3], 6))
    told = []
    with pytest.raises(ValueError, match="a bad step") as raised:
        async for chunk in bad:
            told.append(chunk.item())
    assert told == recurrent_alone(Recurrent(), [BAD_STEP, 3], 6)[:-1]
    assert "Raised in deployment 'm', version '1'" in str(raised.value.__notes__)
    said = await asyncio.gather(*map(read, good))
    assert said == [recurrent_alone(Recurrent(), [n, 3], 6) for n in range(5)]
    del good, bad, raised
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_whole_comes_with_submit_and_map(c, s, a):
    model = await deploy(c, Gated(), allowed_batch_sizes=(2, 8))
    GATE.release(1000)
    futures = model.map([counting(n) for n in range(1, 20)])
    results = await c.gather(futures)
    assert [len(chunks) for chunks in results] == list(range(1, 20))
    assert {len(rows) for rows in ROWS} <= {2, 8}
    whole = model.options(combine=sum).stream(counting(3))
    assert await read(whole) == [2, 1, 0]
    assert (await whole.future).item() == 3
    del futures, whole
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_no_more_are_sent_than_step_together_and_the_first_go_first(c, s, a):
    model = await deploy(c, Gated(), max_batch_size=2)
    first = [model.submit(counting(4)) for _ in range(2)]
    await until(lambda: running(a) == 2)
    GATE.release(1)
    await until(lambda: len(ROWS) == 1)
    line = s.plugins["daskinfer"].dispatcher.lines["m", "1"]
    await until(lambda: line.pace.slots(a.address) == 2)
    others = [model.submit(counting(4)) for _ in range(5)]
    urgent = model.options(priority=10).submit(counting(1))
    await until(lambda: len(line.queue) == 5)
    # Two have slots, one waits for the next, all others where it can be chosen.
    assert line.streams_on(a.address) == 3
    GATE.release(200)
    await urgent
    assert sum(future.done() for future in others) <= 1
    await c.gather(first + others)
    del first, others, urgent
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_requests_of_a_worker_that_is_lost_begin_anew_elsewhere(c, s, a, b):
    model = await deploy(c, Gated())
    futures = model.map([counting(6) for _ in range(6)])
    await until(lambda: running(a) + running(b) == 6 and running(a) and running(b))
    await a.close()
    GATE.release(1000)
    results = await c.gather(futures)
    assert [[chunk.item() for chunk in chunks] for chunks in results] == [
        [5, 4, 3, 2, 1, 0]
    ] * 6
    del futures
    await nothing_is_left(s, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_reader_that_is_slow_sits_out_and_the_others_go_on(c, s, a):
    model = await deploy(c, Gated())
    GATE.release(100_000)
    with dask.config.set({"daskinfer.streaming.window-chunks": 4}):
        slow = model.stream(counting(3000))
        assert (await anext(slow)).item() == 2999
        others = [model.stream(counting(50)) for _ in range(4)]
        assert await asyncio.gather(*map(read, others)) == [list(range(50))[::-1]] * 4
    (live,) = s.plugins["daskinfer"].dispatcher.streams.live
    assert live.request.delivered < 100
    assert sum(rows[0] > 100 for rows in ROWS) < 100
    slow.close()
    del slow, others, live
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_undeploy_while_it_steps(c, s, a):
    model = await deploy(c, Gated())
    future = model.submit(counting(3))
    await until(lambda: running(a) == 1)
    undeploying = asyncio.ensure_future(model.undeploy())
    GATE.release(100)
    await undeploying
    with contextlib.suppress(InferenceError):
        await future
    del future
    await nothing_is_left(s, a)
    assert not a.plugins["daskinfer-runtime"].loader.models


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_warm_up_tries_all_sizes_and_disturbs_no_slot(c, s, a):
    example = request([1, 2, 3], 4)
    model = await deploy(
        c,
        Attention(slots=4),
        allowed_batch_sizes=(1, 2, 8),
        warmup=example,
    )
    (resident,) = a.plugins["daskinfer-runtime"].loader.models.values()
    assert set(resident.function.rows) == {1, 2, 8}
    assert resident.producer.slots.limit == 4
    said = await read(model.stream(*request([4, 5], 6)))
    assert said == Attention(slots=1).alone([4, 5], 6)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_error_of_the_engine_itself_is_told_to_all(c, s, a):
    model = await deploy(c, Gated())
    future = model.submit(counting(5))
    GATE.release(1)
    await until(lambda: len(ROWS) == 1)
    (resident,) = a.plugins["daskinfer-runtime"].loader.models.values()
    with mock.patch.object(resident.producer, "advance", side_effect=OSError("oh")):
        GATE.release(1)
        with pytest.raises(OSError, match="oh"):
            await future
    GATE.release(20)
    assert len(await model.submit(counting(4))) == 4
    del future
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_error_of_the_engine_comes_after_the_chunks_before_it(c, s, a):
    model = await deploy(c, Gated())
    # One step at each turn.
    streams_of(a).steps.slice = 0.0
    with dask.config.set({"daskinfer.streaming.window-chunks": 1}):
        slow = model.stream(counting(5))
    GATE.release(2)
    # It has a chunk for its reader, and another that waits, and sits out.
    await until(lambda: len(ROWS) == 2)
    (resident,) = a.plugins["daskinfer-runtime"].loader.models.values()
    with mock.patch.object(resident.producer, "advance", side_effect=OSError("oh")):
        with pytest.raises(OSError, match="oh"):
            await model.submit(counting(5))
    GATE.release(20)
    assert len(await model.submit(counting(4))) == 4
    assert [(await anext(slow)).item(), (await anext(slow)).item()] == [4, 3]
    with pytest.raises(OSError, match="oh"):
        await anext(slow)
    del slow
    await nothing_is_left(s, a)
    assert not running(a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_who_is_in_no_step_does_not_stall(c, s, a):
    policy = StreamPolicy(idle_timeout="100ms")
    model = await deploy(c, Gated(), streaming=policy)
    streams_of(a).steps.slice = 0.0
    GATE.release(2)
    with dask.config.set({"daskinfer.streaming.window-chunks": 1}):
        slow = model.stream(counting(5))
    await until(lambda: len(ROWS) == 2)
    # Another is in its first step, which takes longer than it may.
    with pytest.raises(StreamStalled):
        await model.submit(counting(3))
    GATE.release(100)
    assert await read(slow) == [4, 3, 2, 1, 0]
    del slow
    await nothing_is_left(s, a)


def slow_counting() -> Any:
    # Pickled by value: worker processes don't import the tests.
    class Slow:
        def start(self, x: Any) -> dict[str, Any]:
            return {"left": x}

        def step(self, state: dict[str, Any]) -> Any:
            import time

            time.sleep(0.005)
            state["left"] = state["left"] - 1
            return state["left"], state["left"] <= 0

    return Slow()


@pytest.mark.parametrize("resume", [None, "replay"])
@gen_cluster(client=True, nthreads=TWO_WORKERS, Worker=Nanny, timeout=120)
async def test_process_that_is_killed_in_mid_stream(c, s, a, b, resume):
    model = (await deploy(c, slow_counting())).options(resume=resume)
    lengths = [30 + 10 * n for n in range(12)]
    streams = [model.stream(counting(n)) for n in lengths]
    told: list[list[int]] = [[] for _ in streams]

    async def listen(stream: Any, its: list[int]) -> None:
        async for chunk in stream:
            its.append(chunk.item())

    listening = [
        asyncio.ensure_future(listen(*both)) for both in zip(streams, told, strict=True)
    ]
    await until(lambda: all(len(its) > 5 for its in told))
    os.kill(a.pid, signal.SIGKILL)
    ended = await asyncio.gather(*listening, return_exceptions=True)
    lost = [error for error in ended if error is not None]
    for its, length, error in zip(told, lengths, ended, strict=True):
        expected = list(range(length))[::-1]
        if error is None:
            assert its == expected
        else:
            # Each once, in order, and what was told is what was counted.
            assert isinstance(error, WorkerLost)
            assert its == expected[: error.chunks]
    assert bool(lost) == (resume is None)
    del streams, listening, ended, lost, error
    await nothing_is_left(s)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_scheduler_hears_how_many_step_together_and_for_how_long(c, s, a):
    model = await deploy(c, Gated())
    pace = s.plugins["daskinfer"].dispatcher.lines["m", "1"].pace
    GATE.release(100_000)
    await c.gather(model.map([counting(40) for _ in range(100)]))
    (resident,) = a.plugins["daskinfer-runtime"].loader.models.values()
    slots = resident.producer.slots
    # No matter what has been learned: the scheduler knows it.
    await until(lambda: pace.slots(a.address) == slots.limit)
    assert 0.5 < pace.seconds(a.address) / slots.seconds < 2
    assert round(pace.steps) == 40
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_another_model_may_call_it(c, s, a):
    inner = await deploy(c, Gated(), name="inner")

    def outer(x: np.ndarray) -> np.ndarray:
        whole = [chunk.item() for chunk in inner(x)]
        read = [chunk.item() for chunk in inner.stream(x)]
        assert whole == read
        return np.array([sum(whole)])

    GATE.release(100)
    model = await deploy(c, outer, name="outer")
    assert (await model.submit(counting(4))).item() == 6
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_who_waits_for_the_slot_of_another_models_stream_takes_no_turns(c, s, a):
    inner = await deploy(c, Attention(slots=1), name="inner")
    expected = Attention(slots=1).alone([3, 4], 20)

    def outer(tokens: Any, steps: Any) -> Iterator[Any]:
        yield from inner.stream(tokens, steps)

    model = await deploy(c, outer, name="outer")
    streams_of(a).steps.slice = 0.0
    with dask.config.set({"daskinfer.streaming.window-chunks": 1}):
        stream = model.stream(*request([3, 4], 20))
    said = [(await anext(stream)).item()]
    found = a.plugins["daskinfer-runtime"].loader.models.values()
    (producer,) = [m.producer for m in found if m.name == "inner"]
    turns = mock.Mock(side_effect=producer.advance)
    with mock.patch.object(producer, "advance", turns):
        other = inner.submit(*request([1, 2], 4))
        await until(lambda: producer.waits)
        before = turns.call_count
        said += [(await anext(stream)).item() for _ in range(10)]
        assert producer.waits and turns.call_count == before
        said += await read(stream)
        assert said == expected
        chunks = [chunk.item() for chunk in await other]
    assert chunks == Attention(slots=1).alone([1, 2], 4)
    del stream, other
    await nothing_is_left(s, a)


class Paced(Local):
    """Counts down; a step takes as long as the worker it is made on has it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def start(self, x: Any) -> dict[str, Any]:
        return {"left": x}

    def step(self, state: dict[str, Any]) -> Any:
        time.sleep(self.seconds[get_worker().address])
        state["left"] = state["left"] - 1
        return state["left"], state["left"] <= 0


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_fast_worker_is_given_more_than_a_slow_one_has(c, s, a, b):
    paced = Paced()
    paced.seconds = {a.address: 0.001, b.address: 0.03}
    model = await deploy(c, paced)
    pace = s.plugins["daskinfer"].dispatcher.lines["m", "1"].pace
    for worker in (a, b):
        pinned = model.options(workers=[worker.address])
        await c.gather(pinned.map([counting(5)] * 4))
    await until(lambda: pace.seconds(b.address) > 5 * pace.seconds(a.address))
    # Of equal workers, each would be given four.
    futures = model.map([counting(20) for _ in range(8)])
    await c.gather(futures)
    about = [await daskinfer.info(future) for future in futures]
    assert [told.worker for told in about] == [a.address] * 8
    del futures
    await nothing_is_left(s, a, b)


class Named(Local):
    """Counts down, and notes whose step it is."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes

    def start(self, x: Any) -> dict[str, Any]:
        return {"left": x}

    def step(self, state: dict[str, Any]) -> Any:
        self.notes.append(self.name)
        state["left"] = state["left"] - 1
        return state["left"], state["left"] <= 0


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_hot_deployment_does_not_starve_another(c, s, a):
    notes: list[str] = []
    hot = await deploy(c, Named("hot", notes), "hot")
    other = await deploy(c, Named("other", notes), "other")
    streams_of(a).steps.slice = 0.0
    crowd = hot.map([counting(100_000) for _ in range(8)])
    await until(lambda: len(notes) > 100)
    few = [other.submit(counting(30)) for _ in range(2)]
    assert [len(chunks) for chunks in await c.gather(few)] == [30, 30]
    first = notes.index("other")
    last = len(notes) - notes[::-1].index("other")
    # Both go on: neither has the device for itself.
    between = notes[first:last]
    assert 30 <= between.count("other") <= 60
    assert between.count("hot") <= 10 * between.count("other")
    await until(lambda: "hot" in notes[last:])
    await c.cancel(crowd)
    del crowd, few
    await nothing_is_left(s, a)
