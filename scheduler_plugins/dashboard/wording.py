"""How figures are written on the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dask.utils import format_bytes

if TYPE_CHECKING:
    from scheduler_plugins.dashboard.view import DeploymentRow, WorkerRow

__all__ = ["count", "memory", "percent", "rate", "ready", "seconds"]

_UNKNOWN = "–"


def seconds(value: float | None) -> str:
    """A duration in a unit that suits it.

    >>> seconds(0.00042), seconds(0.0421), seconds(3.21), seconds(190), seconds(0)
    ('0.42 ms', '42.1 ms', '3.21 s', '3.2 min', '0 s')
    """
    if value is None or math.isnan(value):
        return _UNKNOWN
    if value == 0:
        return "0 s"
    if value < 1:
        digits = 2 if value < 0.01 else 1 if value < 0.1 else 0
        return f"{1e3 * value:.{digits}f} ms"
    return f"{value:.3g} s" if value < 100 else f"{value / 60:.1f} min"


def rate(value: float | None) -> str:
    """So many per second.

    >>> rate(0.5), rate(12.34), rate(12345.6), rate(None)
    ('0.5', '12.3', '12,346', '–')
    """
    if value is None or math.isnan(value):
        return _UNKNOWN
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def count(value: float | None) -> str:
    """A number of things.

    >>> count(12345), count(None)
    ('12,345', '–')
    """
    return _UNKNOWN if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """A share of one.

    >>> percent(0.0512), percent(0.999), percent(1.0), percent(None)
    ('5.1 %', '99.9 %', '100 %', '–')
    """
    if share is None or math.isnan(share):
        return _UNKNOWN
    return f"{100 * share:.1f} %" if 0 < share < 1 else f"{100 * share:.0f} %"


def memory(row: WorkerRow) -> str:
    """What a worker has of its memory."""
    limit = f" of {format_bytes(int(row.memory_limit))}" if row.memory_limit else ""
    return f"{format_bytes(int(row.memory))}{limit}"


def ready(row: DeploymentRow) -> str:
    """How many workers can answer, and how many of them are given no requests."""
    unfit = f", {row.unfit:,} unfit" if row.unfit else ""
    return f"{row.ready:,} of {row.workers:,}{unfit}"
