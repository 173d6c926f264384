"""The streams of one batch on a worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dask.typing import Key

from daskinfer.wording import counted
from daskinfer.worker.live import Live
from daskinfer.worker.turns import Share

if TYPE_CHECKING:
    from daskinfer.worker.async_producing import AsyncProducer
    from daskinfer.worker.execution import Item
    from daskinfer.worker.job import Job
    from daskinfer.worker.producing import Producer


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

    def __repr__(self) -> str:
        return f"<Run of {self.model.name!r}: {counted(len(self.lives), 'stream')}>"

    def dropped(self) -> list[Key]:
        """Take out those whom the model is to give nothing more."""
        gone = [key for key, live in self.lives.items() if live.dropped]
        for key in gone:
            del self.lives[key]
        failed, self.failed = self.failed, []
        return gone + failed
