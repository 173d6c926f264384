"""Streams that take their turns on the device together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dask.typing import Key

from daskinfer.wording import counted
from daskinfer.worker.live import Live, Part
from daskinfer.worker.turns import Share

if TYPE_CHECKING:
    from daskinfer.worker.async_producing import AsyncProducer
    from daskinfer.worker.execution import Item
    from daskinfer.worker.job import Job
    from daskinfer.worker.producing import Producer

T = TypeVar("T", Live, Part)

#: By which factor what a step takes has to change before it is told again.
_NEWS = 1.25


class Run:
    """Streams of a batch that one producer feeds.

    Parameters
    ----------
    producer
        What gives the chunks.
    job
        The batch.
    items
        Its requests.

    Attributes
    ----------
    lives
        The streams that are not told to have ended.
    idle_timeout
        Seconds that a step may take; None: any time.
    share
        What they have had of the device.
    changed
        Set when readers have taken something, or have left.
    started
        When the step at hand began; None: none runs.
    paused
        Those that are to have no further step for now.
    failed
        Those that have failed elsewhere than in the model, which is to stop.
    coming
        Those that the producer does not know yet.
    """

    def __init__(
        self, producer: Producer | AsyncProducer, job: Job, items: dict[Key, Item]
    ) -> None:
        self.producer = producer
        self.job = job
        self.model = job.model
        self.idle_timeout = job.idle_timeout
        self.lives = {key: Live(key, job.streams.get(key)) for key in items}
        for key in job.dropped & self.lives.keys():
            self.lives[key].dropped = True
        self.items = items
        self.share = Share()
        self.changed = asyncio.Event()
        self.started: float | None = None
        self.failed: list[Key] = []
        self.paused: set[Key] = set()
        self.coming: list[Item] = []

    def __repr__(self) -> str:
        return f"<Run of {self.model.name!r}: {counted(len(self.lives), 'stream')}>"

    def is_to_come(self, key: Key) -> bool:
        """Whether what the producer has under a key is another, that has left."""
        return any(item.key == key for item in self.coming)

    def by_job(self, some: Sequence[T]) -> Iterable[tuple[Job, Sequence[T]]]:
        """Divide streams, or parts of some, by the batch that they came with."""
        return [(self.job, some)] if some else []

    def may_step(self) -> bool:
        """Whether there is somebody for whom a turn is of use."""
        return bool(set(self.producer.live).difference(self.paused))

    def remove(self, key: Key) -> None:
        """Nothing more is to be said of a stream."""
        del self.lives[key]

    def close(self) -> None:
        """There will be no more turns."""

    def dropped(self) -> list[Key]:
        """Take out those whom the model is to give nothing more."""
        gone = [key for key, live in self.lives.items() if live.dropped]
        for key in gone:
            self.remove(key)
        failed, self.failed = self.failed, []
        return gone + failed


class JoinedRun(Run):
    """All streams of one model that advances step by step, of whatever batch.

    Parameters
    ----------
    job
        The first batch.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.model.producer, job, {})
        self._jobs: dict[Key, Job] = {}
        self._open: dict[str, tuple[set[Key], asyncio.Future[None]]] = {}
        self._known = 0, 1.0
        loop = asyncio.get_running_loop()
        self._wake = partial(loop.call_soon_threadsafe, self.changed.set)
        job.model.producer.on_room = self._wake

    def __repr__(self) -> str:
        return (
            f"<JoinedRun of {self.model.name!r}: {counted(len(self.lives), 'stream')}>"
        )

    def join(self, job: Job, items: Sequence[Item]) -> asyncio.Future[None]:
        """Let a batch join; what is returned is done when all of it has ended."""
        self.job = job
        ended = asyncio.get_running_loop().create_future()
        self._open[job.batch] = {item.key for item in items}, ended
        for item in items:
            if item.key in self.lives:
                # Of the past, and not wanted: else it would not have come again.
                self.remove(item.key)
                self.failed.append(item.key)
            live = self.lives[item.key] = Live(item.key, job.streams.get(item.key))
            live.dropped = item.key in job.dropped
            self.items[item.key], self._jobs[item.key] = item, job
            self.coming.append(item)
        # What is counted is the mean of all: one that comes has had nothing.
        self.share.used *= 1 - len(items) / len(self.lives)
        self.changed.set()
        return ended

    def may_step(self) -> bool:
        """Whether there is somebody for whom a turn is of use."""
        return super().may_step() and not self.model.producer.waits

    def learned(self) -> bool:
        """Whether there is news of how many step together, and of what a step takes."""
        slots = self.model.producer.slots
        known, before = self._known
        if slots.limit == known and 1 / _NEWS < slots.seconds / before < _NEWS:
            return False
        self._known = slots.limit, slots.seconds
        return True

    def by_job(self, some: Sequence[T]) -> Iterable[tuple[Job, Sequence[T]]]:
        """Divide streams, or parts of some, by the batch that they came with."""
        found: dict[str, tuple[Job, list[T]]] = {}
        for one in some:
            job = self._jobs[one.key]
            found.setdefault(job.batch, (job, []))[1].append(one)
        return found.values()

    def remove(self, key: Key) -> None:
        """Nothing more is to be said of a stream."""
        super().remove(key)
        # The producer would start it, though nobody is to be told.
        self.coming = [item for item in self.coming if item.key != key]
        job = self._jobs.pop(key)
        del self.items[key]
        keys, ended = self._open[job.batch]
        keys.discard(key)
        if not keys:
            ended.set_result(None)
            del self._open[job.batch]

    def close(self) -> None:
        """There will be no more turns."""
        for _, ended in self._open.values():
            ended.set_result(None)
        self._open.clear()
        producer = self.model.producer
        if producer.on_room is self._wake:
            # Else others have begun anew.
            producer.on_room = None
