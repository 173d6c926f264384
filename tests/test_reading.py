"""Chunks between a client's event loop and whoever reads them, without a cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from daskinfer import protocol
from daskinfer.exceptions import InferenceError
from daskinfer.protocol import LEFT, OPEN, Pack
from daskinfer.reading import Inbox, Readings

NOTHING: Pack = {"header": b"", "frames": []}


class Loop:
    """Keeps what is to be called, until a test calls it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def add_callback(self, function: Callable[[], None]) -> None:
        self.waiting.append(function)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class Submitter:
    """Keeps the messages that it is to send."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.sent: list[dict[str, Any]] = []
        self.client = SimpleNamespace(id="c", loop=self.loop, _stream_handlers={})

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def told(keys: list[str], taken: list[int]) -> dict[str, Any]:
    return {"op": protocol.READ, "keys": keys, "taken": taken}


def test_what_is_read_is_told_together() -> None:
    submitter: Any = Submitter()
    readings = Readings(submitter)
    readings.tell("a", 1)
    readings.tell("b", 5)
    readings.tell("a", 2)
    submitter.loop.run()
    assert submitter.sent == [told(["a", "b"], [2, 5])]


@pytest.mark.parametrize("what", [OPEN, LEFT])
def test_who_waits_for_the_whole_is_not_said_to_read(what: int) -> None:
    submitter: Any = Submitter()
    readings = Readings(submitter)
    readings.tell("a", what)
    readings.tell("a", 7)
    submitter.loop.run()
    readings.tell("a", OPEN)
    readings.tell("a", LEFT)
    submitter.loop.run()
    assert submitter.sent == [told(["a"], [what]), told(["a"], [LEFT])]


def test_a_stream_may_be_collected_while_another_is_told() -> None:
    """Python may collect garbage at any allocation, and on any thread."""
    submitter: Any = Submitter()
    readings = Readings(submitter)

    class Collecting(dict[str, int]):
        def __setitem__(self, key: str, taken: int) -> None:
            if key == "a":
                readings.tell("garbage", LEFT)
            super().__setitem__(key, taken)

    readings._taken = Collecting()
    thread = threading.Thread(target=readings.tell, args=("a", 1), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    submitter.loop.run()
    assert submitter.sent == [told(["garbage", "a"], [LEFT, 1])]


def test_chunks_that_come_twice_are_taken_once() -> None:
    inbox = Inbox()
    inbox.arrive(0, 2, 8, False, NOTHING)
    inbox.arrive(0, 2, 8, False, NOTHING)
    inbox.arrive(1, 3, 12, False, NOTHING)
    inbox.end()
    inbox.end()
    parts = [inbox.take(), inbox.take(), inbox.take()]
    assert [part.skip for part in parts if part] == [0, 2, 1]
    assert inbox.take() is None and inbox.take() is None


def test_chunks_that_are_lost_are_no_end() -> None:
    inbox = Inbox()
    inbox.arrive(0, 2, 8, False, NOTHING)
    inbox.arrive(4, 1, 4, False, NOTHING)
    inbox.arrive(2, 2, 8, False, NOTHING)
    inbox.end()
    assert inbox.take() is not None
    for _ in range(2):
        with pytest.raises(InferenceError, match="chunks 2 to 3 of a stream are lost"):
            inbox.take()
    with pytest.raises(InferenceError, match="are lost"):
        asyncio.run(inbox.take_async())


def test_who_waits_is_told_that_chunks_are_lost() -> None:
    async def main() -> None:
        inbox = Inbox()
        waiting = asyncio.ensure_future(inbox.take_async())
        await asyncio.sleep(0)
        inbox.arrive(1, 1, 4, False, NOTHING)
        with pytest.raises(InferenceError, match="chunks 0 to 0"):
            await asyncio.wait_for(waiting, 10)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["chunks", "end", "gap"])
def test_inbox_says_when_there_is_something_to_take(how: str) -> None:
    inbox, told = Inbox(), []
    inbox.add_done_callback(lambda whose: told.append(whose.done()))
    assert not told and not inbox.done()
    if how == "end":
        inbox.end()
    else:
        inbox.arrive(int(how == "gap"), 1, 8, False, NOTHING)
    assert told == [True] and inbox.done()
    inbox.add_done_callback(lambda whose: told.append(whose.done()))
    assert told == [True, True]
