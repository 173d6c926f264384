"""Counting what happens to the requests of one deployment.

Pure: the time is an argument.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from daskinfer.status import LatencyPercentiles
from scheduler_plugins.measures import Measures
from scheduler_plugins.outcomes import Outcomes

#: How many of the latest answers the percentiles look at.
RECENT = 4096
#: Seconds over which throughput is measured.
WINDOW = 10.0


@dataclass(slots=True)
class WorkerCounts:
    """What one worker has answered."""

    batches: int = 0
    passes: int = 0
    rows: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Figures:
    """How the requests ended that one version had.

    Examples
    --------
    >>> figures = Figures()
    >>> figures.succeeded(0.010)
    >>> figures.failed()
    >>> figures.requests, figures.failures, figures.latency().p50
    (2, 1, 0.01)
    """

    requests: int = 0
    failures: int = 0
    measures: Measures = field(default_factory=Measures, repr=False)
    _recent: deque[float] = field(
        default_factory=lambda: deque(maxlen=RECENT), repr=False
    )

    def succeeded(self, latency: float | None) -> None:
        """Count an answer; ``latency`` in seconds from the request's arrival.

        It is None for what was found in a cache: versions that have been asked less
        find less, and are not slower for that.
        """
        self.requests += 1
        if latency is not None:
            self._recent.append(latency)

    @property
    def measured(self) -> int:
        """How many answers the percentiles look at."""
        return len(self._recent)

    def failed(self) -> None:
        """Count a request that failed."""
        self.requests += 1
        self.failures += 1

    def latency(self) -> LatencyPercentiles:
        """Percentiles of the latest answers."""
        return _percentiles(self._recent)


@dataclass(slots=True)
class Statistics:
    """Counters of one deployment.

    Every request is counted once on arrival, and once when it ends: as a success,
    a failure or cancelled. One whose result is lost with its worker and computed
    again, or that the user retries, counts again as a request. ``outcomes`` say more
    about the ends; those of a deployment that is gone are counted elsewhere.

    Examples
    --------
    >>> counts = Statistics()
    >>> counts.arrived(2)
    >>> counts.succeeded([0.010, 0.030], now=1.0)
    >>> counts.requests, counts.successes, counts.latency().mean
    (2, 2, 0.02)
    """

    requests: int = 0
    successes: int = 0
    failures: int = 0
    cancelled: int = 0
    batches: int = 0
    passes: int = 0
    rows: int = 0
    padded_rows: int = 0
    workers: dict[str, WorkerCounts] = field(default_factory=dict)
    outcomes: Outcomes = field(default_factory=Counter)
    _began: float | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _answers: deque[tuple[float, int]] = field(default_factory=deque)

    def __repr__(self) -> str:
        return (
            f"<Statistics requests: {self.requests} successes: {self.successes} "
            f"failures: {self.failures} cancelled: {self.cancelled}>"
        )

    def arrived(self, count: int = 1) -> None:
        """Count requests that arrived."""
        self.requests += count

    def succeeded(self, latencies: Sequence[float], now: float) -> None:
        """Count answers; ``latencies`` in seconds from arrival."""
        if self._began is None:
            # When the first was sent off, as near as can be told.
            self._began = now - max(latencies, default=0.0)
        self.successes += len(latencies)
        self._recent.extend(latencies)
        self._answers.append((now, len(latencies)))
        self._forget(now)

    def ran(self, worker: str, passes: Sequence[tuple[int, int, float]]) -> None:
        """Count a batch: ``(rows, padded rows, seconds)`` of each pass."""
        counts = self.workers.setdefault(worker, WorkerCounts())
        self.batches += 1
        counts.batches += 1
        for rows, padded, seconds in passes:
            self.passes += 1
            self.rows += rows
            self.padded_rows += padded - rows
            counts.passes += 1
            counts.rows += rows
            counts.seconds += seconds

    def latency(self) -> LatencyPercentiles:
        """Percentiles of the latest answers."""
        return _percentiles(self._recent)

    def throughput(self, now: float) -> float:
        """Answers per second over the last :data:`WINDOW` seconds, or since the first.

        >>> counts = Statistics()
        >>> counts.succeeded([0.010] * 30, now=1.0)
        >>> counts.succeeded([0.010] * 30, now=3.0)
        >>> round(counts.throughput(now=3.0), 1), counts.throughput(now=21.0)
        (29.9, 0.0)
        """
        self._forget(now)
        if self._began is None or now <= self._began:
            return 0.0
        answered = sum(count for _, count in self._answers)
        return answered / min(now - self._began, WINDOW)

    def _forget(self, now: float) -> None:
        while self._answers and self._answers[0][0] < now - WINDOW:
            self._answers.popleft()


def _percentiles(latencies: Iterable[float]) -> LatencyPercentiles:
    ordered = sorted(latencies)
    if not ordered:
        return LatencyPercentiles()
    last = len(ordered) - 1
    return LatencyPercentiles(
        p50=ordered[round(0.50 * last)],
        p95=ordered[round(0.95 * last)],
        p99=ordered[round(0.99 * last)],
        mean=sum(ordered) / len(ordered),
    )
