"""Execution time against batch size, as lines between measured points."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

__all__ = ["Curve"]


class Curve:
    """Seconds against rows: straight lines between points, never falling.

    Below the first point it is constant. Beyond the last one it goes on with the
    slope of the last line, but never flatter than a quarter of proportional growth:
    what was not measured must not look free.

    Parameters
    ----------
    rows, seconds : sequence of float
        The points; `rows` strictly increasing, `seconds` not decreasing.

    Examples
    --------
    >>> curve = Curve([1, 8], [0.010, 0.024])
    >>> round(curve.at(4), 3), round(curve.at(10), 3), curve.rows_within(0.020)
    (0.016, 0.028, 6)
    """

    __slots__ = ("_slope", "rows", "seconds")

    def __init__(self, rows: Iterable[float], seconds: Iterable[float]) -> None:
        self.rows = tuple(rows)
        self.seconds = tuple(seconds)
        per_row = self.seconds[-1] / self.rows[-1]
        if len(self.rows) == 1:
            self._slope = 0.5 * per_row
        else:
            rise = self.seconds[-1] - self.seconds[-2]
            run = self.rows[-1] - self.rows[-2]
            self._slope = max(rise / run, 0.25 * per_row)

    def at(self, rows: float) -> float:
        """Seconds that a batch of `rows` takes."""
        xs, ys = self.rows, self.seconds
        if rows <= xs[0]:
            return ys[0]
        if rows >= xs[-1]:
            return ys[-1] + self._slope * (rows - xs[-1])
        i = bisect_left(xs, rows)
        share = (rows - xs[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + share * (ys[i] - ys[i - 1])

    def rows_within(self, seconds: float) -> int:
        """The most rows that take no longer than `seconds`, of those measured."""
        xs, ys = self.rows, self.seconds
        i = bisect_right(ys, seconds)
        if i == 0:
            return 0
        if i == len(ys):
            return int(xs[-1])
        share = (seconds - ys[i - 1]) / (ys[i] - ys[i - 1])
        return int(xs[i - 1] + share * (xs[i] - xs[i - 1]))

    def __repr__(self) -> str:
        points = ", ".join(
            f"{rows:.0f}: {1e3 * seconds:.2f}ms"
            for rows, seconds in zip(self.rows, self.seconds, strict=True)
        )
        return f"<Curve {points}>"
