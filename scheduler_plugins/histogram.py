"""Counting values by size, as cheaply as can be. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["DURATIONS", "RATIOS", "ROWS", "Histogram"]

#: Seconds: half a millisecond is an answer from a cache, a minute is far too long.
DURATIONS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
#: Rows of a forward pass.
ROWS = tuple(float(2**power) for power in range(13))
#: How many times what was expected; 1 is as expected.
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Histogram:
    """How many values were how large.

    Parameters
    ----------
    bounds
        The upper bounds of the buckets, ascending; each belongs to its bucket. Larger
        values have a bucket of their own.

    Attributes
    ----------
    total
        The sum of all values.

    Notes
    -----
    A value costs one bisection. Not thread-safe.

    Examples
    --------
    >>> histogram = Histogram((0.01, 0.1))
    >>> for seconds in (0.004, 0.01, 3.0):
    ...     histogram.observe(seconds)
    >>> histogram.cumulative(), histogram.count, histogram.total
    ([(0.01, 2), (0.1, 2), (inf, 3)], 3, 3.014)
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def __repr__(self) -> str:
        return f"<Histogram values: {self.count} total: {self.total:g}>"

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """For each bound, how many values were not above it."""
        reached, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            reached += count
            found.append((bound, reached))
        return found
