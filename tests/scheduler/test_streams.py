"""Streams at the scheduler, without workers: what comes twice, and who gets them."""

from __future__ import annotations

from typing import Any

import pytest

from daskinfer import protocol
from daskinfer.failure import dump_failure
from daskinfer.protocol import CHUNKS, STEPS
from scheduler_plugins.line import Line
from tests.scheduler.bench import A, B, Bench, done_message, settle
from tests.scheduler.virtual import on_loop

ORDER: protocol.StreamOrder = {
    "read": True,
    "nbytes": 2**20,
    "chunks": 256,
    "keep": True,
    "combine": None,
    "replay": False,
    "skip": 0,
}


async def streaming(bench: Bench, *keys: str) -> tuple[Line, str]:
    """Have requests streamed to the client ``c``; return the line and their batch."""
    line = bench.open()
    for request in bench.enqueue(line, *keys):
        request.client, request.stream = "c", ORDER
    await settle()
    ((address, message),) = bench.runs
    about = {"keys": [], "streaming": list(keys)}
    bench.dispatcher.done(done_message(message, 0.1) | about, address)
    assert len(bench.dispatcher.streams.live) == len(keys)
    return line, message["batch"]


def chunks(batch: str, key: str, first: int, count: int) -> Any:
    return {
        "op": CHUNKS,
        "batch": batch,
        "keys": [key],
        "firsts": [first],
        "counts": [count],
        "nbytes": [8 * count],
        "more": [False],
        "packs": [{"header": b"", "frames": []}],
    }


def ended(batch: str, counts: dict[str, int], failed: Any = None) -> Any:
    failed = failed or {}
    return {
        "op": protocol.ENDED,
        "batch": batch,
        "keys": [key for key in counts if key not in failed],
        "failed": failed,
        "counts": counts,
        "device": "cpu",
        "broken": "",
        "stimulus_id": "ended",
    }


@on_loop
async def test_chunks_that_come_twice_are_sent_on_once() -> None:
    bench = Bench()
    line, batch = await streaming(bench, "a", "b")
    streams, told = bench.dispatcher.streams, bench.tasks.told
    for first, count in [(0, 1), (1, 3), (4, 2)]:
        for _ in range(2):
            streams.chunks(chunks(batch, "a", first, count), A)
    sent = [(m["keys"], m["firsts"], m["counts"]) for _, m in told]
    assert sent == [(["a"], [0], [1]), (["a"], [1], [3]), (["a"], [4], [2])]
    measures = line.figures.measures.streams
    assert (measures.chunks, measures.nbytes) == (6, 48)
    assert (measures.first.count, measures.between.count) == (1, 2)
    # Nobody else can say anything of it.
    streams.chunks(chunks(batch, "a", 6, 1), B)
    streams.chunks(chunks("another", "a", 6, 1), A)
    assert len(told) == 3 and measures.chunks == 6


@pytest.mark.parametrize("fails", [False, True])
@on_loop
async def test_end_that_comes_twice_is_one(fails: bool) -> None:
    bench = Bench()
    line, batch = await streaming(bench, "a", "b")
    learned: list[int] = []
    line.pace.ended = learned.append  # type: ignore[method-assign]
    failed = {"a": dump_failure(ValueError("no"))} if fails else {}
    message = ended(batch, {"a": 5}, failed)
    for _ in range(2):
        bench.dispatcher.stream_ended(message, A)
    # Nor do chunks after it count.
    bench.dispatcher.streams.chunks(chunks(batch, "a", 5, 1), A)
    assert not bench.tasks.told
    assert [s.request.key for s in bench.dispatcher.streams.live] == ["b"]
    outcomes = line.figures.measures.streams.outcomes
    assert outcomes == {"failed" if fails else "ended": 1}
    assert learned == ([] if fails else [5])
    assert line.streaming.total() == 1
    completed = [ids for m, ids in bench.tasks.completed if m is message]
    assert completed == [{"a": 1}, {}]
    assert list(bench.tasks.failed) == ["a"] * fails


@pytest.mark.parametrize("slow", [A, B])
@on_loop
async def test_steps_are_counted_and_not_requests(slow: str) -> None:
    bench = Bench()
    line = bench.open(workers=(A, B))
    line.kind = STEPS
    for address in (A, B):
        seconds = 0.1 if address == slow else 0.001
        about = {"name": "m", "version": "1", "slots": 16, "seconds": seconds}
        bench.dispatcher.paced(about, address)  # type: ignore[arg-type]
    bench.enqueue(line, *range(12))
    await settle()
    assert {address for address, _ in bench.batches} == {A, B} - {slow}
    assert sum(len(keys) for _, keys in bench.batches) == 12


@on_loop
async def test_seconds_to_the_first_chunk_and_between_chunks(monkeypatch: Any) -> None:
    clock = [10.0]
    monkeypatch.setattr("scheduler_plugins.streams.monotonic", lambda: clock[0])
    bench = Bench()
    line, batch = await streaming(bench, "a", "b")
    for request, _ in bench.requests.values():
        request.arrived = 8.0
    streams, measures = bench.dispatcher.streams, line.figures.measures.streams
    for seconds, key, first, count in [
        (1.0, "a", 0, 1),
        (0.5, "b", 0, 2),
        # Those that come together have come one after the other.
        (1.5, "a", 1, 4),
        (0.0, "a", 1, 4),
        (0.25, "b", 2, 1),
    ]:
        clock[0] += seconds
        streams.chunks(chunks(batch, key, first, count), A)
    assert (measures.first.count, measures.first.total) == (2, 3.0 + 3.5)
    assert (measures.between.count, measures.between.total) == (2, 2.0 / 4 + 1.75)
    assert measures.chunks == 8
    assert line.streaming.total() == 2
    bench.dispatcher.stream_ended(ended(batch, {"a": 5, "b": 3}), A)
    assert line.streaming.total() == 0


@on_loop
async def test_hot_deployment_does_not_hold_the_steps_of_another_up() -> None:
    bench = Bench()
    hot, other = bench.open("hot"), bench.open("other")
    for line in (hot, other):
        line.kind = STEPS
    bench.enqueue(hot, *(f"hot-{n}" for n in range(200)))
    await settle()
    for address, message in bench.runs:
        about = {"keys": [], "streaming": message["keys"]}
        bench.dispatcher.done(done_message(message, 0.1) | about, address)
    await settle()
    # The hot one has all its slots taken, and one more; what waits is in nobody's way.
    sent = {key for _, keys in bench.batches for key in keys}
    assert len(sent) == hot.pace.room(A)
    few = [f"other-{n}" for n in range(5)]
    bench.enqueue(other, *few)
    await settle()
    assert [key for _, keys in bench.batches for key in keys if key in few] == few
    assert len(hot.queue.requests()) == 200 - len(sent)
