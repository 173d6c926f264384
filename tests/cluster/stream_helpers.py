"""Models that answer piece by piece as a test lets them, and those who read them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from distributed import Worker

from daskinfer.stream import Stream
from tests.cluster.helpers import PATIENCE, Local, until


class Feed(Local):
    """A model that gives one chunk whenever a test lets it: its input, counted up.

    Parameters
    ----------
    length
        How many chunks it gives; None: for ever.
    is_open
        Whether it gives them at once.

    Attributes
    ----------
    given, closed
        How many chunks it has given, and how many of its generators were left.
    """

    def __init__(self, length: int | None = None, is_open: bool = False) -> None:
        self.length = length
        self.given = 0
        self.begun = 0
        self.closed = 0
        self._let = threading.Semaphore(0)
        self._is_open = is_open

    def __call__(self, start: int = 0) -> Iterator[int]:
        self.begun += 1
        number = start
        try:
            while self.length is None or number < start + self.length:
                self._wait()
                self.given += 1
                yield number
                number += 1
            self._wait()
        except GeneratorExit:
            self.closed += 1
            raise

    def let(self, steps: int = 1) -> None:
        """Let it go on, by so many steps; the last one ends it."""
        self._let.release(steps)

    def open(self) -> None:
        """Let it go on for good."""
        self._is_open = True
        self._let.release(1000)

    def _wait(self) -> None:
        if not self._is_open and not self._let.acquire(timeout=PATIENCE):
            raise TimeoutError("the test never let its model go on")


async def read(stream: Stream) -> list[Any]:
    """All chunks of a stream."""
    return [chunk async for chunk in stream]


def streams_of(worker: Worker) -> Any:
    """What a worker knows of streams."""
    runtime: Any = worker.plugins["daskinfer-runtime"]
    return runtime.streams


async def told(worker: Worker) -> None:
    """Wait until a worker knows that nobody wants its streams any more."""
    runs = streams_of(worker)._runs.values()
    await until(
        lambda: all(
            live.dropped
            for batch in runs
            for run in batch
            for live in run.lives.values()
        )
    )


async def live(worker: Worker, count: int) -> None:
    """Wait until a worker has so many streams."""
    await until(lambda: streams_of(worker).count == count)
