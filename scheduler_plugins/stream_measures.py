"""What is measured of the streams of one deployment version. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from scheduler_plugins.histogram import DURATIONS, Histogram


@dataclass(slots=True)
class StreamMeasures:
    """Histograms and counters of streams.

    Attributes
    ----------
    first
        Seconds from a request's arrival until its first chunk came.
    between
        Seconds from one chunk to the next, as they reach the scheduler.
    chunks, nbytes
        What was sent on to readers.
    outcomes
        Streams by how they ended: ``"ended"`` by themselves, ``"failed"``,
        ``"stopped"`` as nobody wanted more, or ``"interrupted"`` with their worker or
        device.

    Examples
    --------
    >>> measures = StreamMeasures()
    >>> measures.began(1, nbytes=8, seconds=0.02)
    >>> measures.went_on(2, nbytes=16, seconds=0.01)
    >>> measures.ended("ended")
    >>> measures.chunks, measures.nbytes, measures.between.total
    (3, 24, 0.005)
    """

    first: Histogram = field(default_factory=partial(Histogram, DURATIONS))
    between: Histogram = field(default_factory=partial(Histogram, DURATIONS))
    chunks: int = 0
    nbytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def began(self, chunks: int, nbytes: int, seconds: float) -> None:
        """Count the first chunks of a stream."""
        self.first.observe(max(seconds, 0.0))
        self._count(chunks, nbytes)

    def went_on(self, chunks: int, nbytes: int, seconds: float) -> None:
        """Count chunks that came so many seconds after others."""
        self.between.observe(max(seconds, 0.0) / chunks)
        self._count(chunks, nbytes)

    def ended(self, how: str) -> None:
        """Count a stream that has ended."""
        self.outcomes[how] += 1

    def _count(self, chunks: int, nbytes: int) -> None:
        self.chunks += chunks
        self.nbytes += nbytes
