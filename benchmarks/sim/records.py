"""What happens to requests, batches and devices in a simulation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler_plugins.load import DeviceLoad

__all__ = ["Batch", "Device", "Request", "Result"]


@dataclass(slots=True, eq=False)
class Request:
    """A request; a large one may be spread over several batches."""

    arrived: float
    rows: int
    unsent: int
    unanswered: int


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way, with the requests that it has rows of."""

    id: str
    device: Device
    rows: int
    parts: list[tuple[Request, int]]
    sent: float
    reason: str
    probe: bool
    #: When the device was going to be done with what it had, as it really came.
    predecessor_ends: float | None
    received: float = 0.0
    started: float = 0.0
    seconds: float = 0.0
    answered: float = float("inf")
    failed: bool = False


@dataclass(slots=True, eq=False)
class Device:
    """A device that runs its batches one after the other."""

    load: DeviceLoad
    slowness: float
    queue: deque[Batch] = field(default_factory=deque)
    running: Batch | None = None
    called: set[int] = field(default_factory=set)
    rows: int = 0


@dataclass
class Result:
    """What came out, in the order of the answers. Seconds."""

    latencies: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    failures: int = 0
    unanswered: int = 0

    def _kept(self, skip: float) -> list[float]:
        return sorted(self.latencies[int(skip * len(self.latencies)) :])

    def mean(self, skip: float = 0.2) -> float:
        """Mean latency without the first share `skip` of the answers."""
        kept = self._kept(skip)
        return sum(kept) / len(kept)

    def percentile(self, percent: float, skip: float = 0.2) -> float:
        """Latency that `percent` of the answers stay below."""
        kept = self._kept(skip)
        return kept[min(int(percent / 100 * len(kept)), len(kept) - 1)]

    def within(self, seconds: float, skip: float = 0.2) -> float:
        """Share of the answers that took at most `seconds`."""
        kept = self._kept(skip)
        return sum(latency <= seconds for latency in kept) / len(kept)

    def throughput(self, skip: float = 0.2) -> float:
        """Answers per second."""
        first = int(skip * len(self.answered))
        start = self.answered[first - 1] if first else 0.0
        return (len(self.answered) - first) / (self.answered[-1] - start)

    @property
    def makespan(self) -> float:
        """When the last answer came."""
        return self.answered[-1]

    @property
    def sizes(self) -> list[int]:
        """Rows of each batch, in the order in which they were sent."""
        return [batch.rows for batch in self.batches]
