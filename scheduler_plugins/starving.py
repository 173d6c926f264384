"""Who has waited long without any device to go to, and was told of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_plugins.line import Line


class Starvation:
    """Reports versions that starve: once, until something changes.

    Pure: the time is an argument.

    Parameters
    ----------
    report
        Called with a version that has starved for ``after``.
    after
        Seconds; infinite: never.

    Examples
    --------
    >>> starvation = Starvation(print, after=10.0)
    >>> starvation.begun("line", now=1.0), starvation.begun("line", now=5.0)
    (11.0, 11.0)
    >>> starvation.begun("line", now=11.0)
    line
    inf
    >>> starvation.begun("line", now=12.0)
    inf
    """

    def __init__(self, report: Callable[[Line], None], after: float) -> None:
        self._report = report
        self._after = after
        self._due: dict[Line, float] = {}

    def __repr__(self) -> str:
        return f"<Starvation of {len(self._due)} versions>"

    def begun(self, line: Line, now: float) -> float:
        """A version has no device to go to; return when to ask again."""
        due = self._due.setdefault(line, now + self._after)
        if now < due:
            return due
        if math.isfinite(due):
            self._due[line] = math.inf
            self._report(line)
        return math.inf

    def ended(self, line: Line) -> None:
        """A version has devices to go to, or is gone."""
        self._due.pop(line, None)

    def clear(self) -> None:
        """There is something new to say: say it again."""
        self._due.clear()
