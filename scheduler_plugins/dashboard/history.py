"""How the figures of a deployment have moved. Pure: the time is an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields

from scheduler_plugins.dashboard.view import DeploymentRow

__all__ = ["INTERVAL", "SPAN", "History", "Point", "Rate"]

#: Seconds between two readings, at least.
INTERVAL = 0.5
#: Seconds that are remembered.
SPAN = 120.0
# Nobody has looked for so long: lines are broken there.
_GAP = 5 * INTERVAL
_NAN = math.nan


@dataclass(frozen=True, slots=True)
class Point:
    """What the plots over time show of one moment.

    Rates are per second, times in seconds, and unknown values are not a number.
    """

    at: float
    arrived: float = _NAN
    answered: float = _NAN
    failed: float = _NAN
    waiting: float = _NAN
    oldest: float = _NAN
    p50: float = _NAN
    p95: float = _NAN
    p99: float = _NAN
    batch_size: float = _NAN
    best_size: float = _NAN


class Rate:
    """How fast counters by name have grown over the latest readings.

    Parameters
    ----------
    readings
        How many of them.

    Examples
    --------
    >>> rate = Rate(3)
    >>> rate.add(0.0, {"a": 0.0}); rate.add(1.0, {"a": 5.0, "b": 2.0})
    >>> rate.grown(), rate.seconds
    ({'a': 5.0, 'b': 2.0}, 1.0)
    """

    def __init__(self, readings: int) -> None:
        self._readings: deque[tuple[float, Mapping[str, float]]]
        self._readings = deque(maxlen=readings)

    def __repr__(self) -> str:
        return f"<Rate of {len(self._readings)} readings>"

    def add(self, at: float, totals: Mapping[str, float]) -> None:
        """Take in one reading; what is older than a gap is forgotten."""
        if self._readings and at - self._readings[-1][0] > _GAP:
            self._readings.clear()
        self._readings.append((at, totals))

    @property
    def seconds(self) -> float:
        """Between the first and the last of them."""
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0.0

    def grown(self) -> dict[str, float]:
        """By how much each counter has grown; one that is new began at zero."""
        if not self._readings:
            return {}
        first, last = self._readings[0][1], self._readings[-1][1]
        # One that began anew has not shrunk.
        return {
            name: max(value - first.get(name, 0.0), 0.0) for name, value in last.items()
        }

    def per_second(self) -> dict[str, float]:
        """The same by second; not a number before the second reading."""
        seconds = self.seconds
        return {
            name: value / seconds if seconds else _NAN
            for name, value in self.grown().items()
        }


class History:
    """The latest readings of one deployment, at nearly even distances.

    Examples
    --------
    >>> history = History()
    >>> history.add(1.0, DeploymentRow("m", "1", successes=10, passes=2, rows=8))
    >>> history.add(2.0, DeploymentRow("m", "1", successes=40, passes=4, rows=40))
    >>> columns = history.columns(now=2.5)
    >>> columns["at"], columns["answered"][-1], columns["batch_size"][-1]
    ([-1.5, -0.5], 30.0, 16.0)
    """

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=int(SPAN / INTERVAL))
        self._totals = Rate(5)
        self._rows = Rate(int(10 / INTERVAL) + 1)

    def __repr__(self) -> str:
        return f"<History of {len(self._points)} points>"

    def add(self, at: float, row: DeploymentRow) -> None:
        """Take in one reading."""
        self._totals.add(
            at,
            {
                "arrived": row.requests,
                "answered": row.successes,
                "failed": row.failures,
                "passes": row.passes,
                "rows": row.rows,
            },
        )
        self._rows.add(at, row.rows_by_worker)
        if self._points and at - self._points[-1].at > _GAP:
            self._points.append(Point(self._points[-1].at))
        rates = self._totals.per_second()
        grown = self._totals.grown()
        self._points.append(
            Point(
                at,
                rates["arrived"],
                rates["answered"],
                rates["failed"],
                row.waiting + row.delayed,
                row.oldest,
                _number(row.latency.p50),
                _number(row.latency.p95),
                _number(row.latency.p99),
                grown["rows"] / grown["passes"] if grown["passes"] else _NAN,
                _number(row.best_size),
            )
        )

    def columns(self, now: float) -> dict[str, list[float]]:
        """One list for each field of :class:`Point`; ``at`` is below zero, from now."""
        names = [field.name for field in fields(Point)]
        columns = {name: [getattr(p, name) for p in self._points] for name in names}
        columns["at"] = [at - now for at in columns["at"]]
        return columns

    def shares(self) -> dict[str, float]:
        """The part of the latest rows that each worker ran, between 0 and 1."""
        grown = self._rows.grown()
        total = sum(grown.values())
        return {address: rows / total for address, rows in grown.items() if total}


def _number(value: float | None) -> float:
    return _NAN if value is None else value
