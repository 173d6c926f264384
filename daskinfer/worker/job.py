"""A batch that has arrived at a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.typing import Key

if TYPE_CHECKING:
    from daskinfer import protocol
    from daskinfer.worker.models import ResidentModel


@dataclass(slots=True)
class Job:
    """A batch that has arrived.

    ``contents`` says what requests are, where the client has told. Of one that is
    ``held`` all results should be in the cache, and the scheduler does not expect it on
    the device. One that ``waits_for`` more than its turn was said to do so. Of those in
    ``streams`` the answers are read piece by piece.
    """

    batch: str
    model: ResidentModel
    payloads: dict[Key, protocol.Payload]
    who_has: dict[Key, list[str]]
    pass_sizes: list[int]
    pass_rows: int
    inline: int
    contents: dict[Key, bytes]
    held: bool
    arrived: float
    active: Mapping[str, str]
    done: asyncio.Future[None]
    started: float | None = None
    fetching: bool = False
    waits_for: str = ""
    ended: float = 0.0
    dropped: set[Key] = field(default_factory=set)
    streams: dict[Key, protocol.StreamOrder] = field(default_factory=dict)
    idle_timeout: float | None = None

    def begin(self, now: float) -> None:
        """It is on the device, perhaps again."""
        if self.started is None:
            self.started = self.ended = now

    @property
    def about(self) -> dict[str, Any]:
        """What log lines say that they are about."""
        return {
            "deployment": self.model.name,
            "version": self.model.version,
            "stimulus_id": f"daskinfer-run-{self.batch}",
        }

    @property
    def waited(self) -> float:
        """Seconds before it was on the device; 0 if it never was."""
        return 0.0 if self.started is None else self.started - self.arrived

    @property
    def ran(self) -> float:
        """Seconds from then on until it had been run."""
        return 0.0 if self.started is None else self.ended - self.started
