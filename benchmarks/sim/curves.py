"""Execution time against batch size: the shapes that real devices show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["CURVES", "Shape"]


@dataclass(frozen=True)
class Shape:
    """What a batch costs on a device of speed 1.

    Parameters
    ----------
    seconds : callable
        Rows to seconds.
    max_rows : int
        The largest batch.
    allowed : tuple of int, optional
        Sizes that batches are padded to; `seconds` is asked for these only.
    """

    seconds: Callable[[int], float]
    max_rows: int
    allowed: tuple[int, ...] | None = None

    def at(self, rows: int) -> float:
        """Seconds of a batch of `rows`, padded where need be."""
        if self.allowed:
            rows = self.allowed[bisect_left(self.allowed, rows)]
        return self.seconds(rows)

    def capacity(self, slowness: Sequence[float] = (1.0,)) -> float:
        """Rows per second that devices of this slowness can do at best."""
        best = max(rows / self.at(rows) for rows in range(1, self.max_rows + 1))
        return sum(best / slow for slow in slowness)


def _line(fixed: float, per_row: float) -> Callable[[int], float]:
    return lambda rows: 1e-3 * (fixed + per_row * rows)


def _through(points: dict[int, float]) -> Callable[[int], float]:
    xs = sorted(points)

    def seconds(rows: int) -> float:
        i = bisect_left(xs, rows)
        high = points[xs[i]]
        if xs[i] == rows:
            return high
        low = points[xs[i - 1]]
        return low + (high - low) * (rows - xs[i - 1]) / (xs[i] - xs[i - 1])

    return seconds


def _knee(rows: int) -> float:
    return 1e-3 * (8 if rows <= 32 else 8 + 0.25 * (rows - 32))


_SIZES = (1, 2, 4, 8, 16, 32)

# Rows per second of a small CNN on one CPU core, measured: not monotone.
_CPU_RATES = {
    1: 3489,
    2: 3323,
    4: 3955,
    8: 4514,
    16: 4640,
    32: 3054,
    64: 3905,
    128: 4959,
    256: 3746,
    512: 2542,
}

#: Shapes by name.
CURVES = {
    # A large fixed cost: the larger the better.
    "steep": Shape(_line(20, 0.5), 64),
    # A small one: the round trip counts.
    "flat": Shape(_line(2, 1.0), 64),
    # Hardly anything: the round trip is all.
    "tiny": Shape(_line(0.3, 0.05), 128),
    # Free up to a knee, proportional beyond.
    "knee": Shape(_knee, 256),
    # Static shapes, well-behaved.
    "sizes": Shape(_line(3.5, 0.5), 32, _SIZES),
    # Static shapes, the largest of which is worse than two of the one below.
    "step": Shape(
        _through({1: 4e-3, 2: 4.2e-3, 4: 4.6e-3, 8: 6e-3, 16: 10e-3, 32: 24e-3}),
        32,
        _SIZES,
    ),
    # A measured one: rises, falls, rises and falls again.
    "cpu": Shape(_through({n: n / rate for n, rate in _CPU_RATES.items()}), 512),
    # All that fits takes the same time.
    "constant": Shape(_line(100, 0), 256),
}
