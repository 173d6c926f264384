"""One alarm on the event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from distributed.metrics import monotonic


class Timer:
    """Calls a function once, at the time set last.

    To set it costs next to nothing where the time is later than another that was set
    before: the event loop is asked again when that has come.

    Parameters
    ----------
    function
        What to call.

    Attributes
    ----------
    at
        When, in monotonic seconds; infinite while it is not set.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.at = math.inf
        self._function = function
        self._handle: asyncio.TimerHandle | None = None
        self._rings_at = math.inf

    def __repr__(self) -> str:
        return f"<Timer at {self.at:g}>"

    def set(self, at: float) -> None:
        """Set the time, instead of any other; infinite for none."""
        self.at = at
        if at < self._rings_at:
            self._arm()

    def cancel(self) -> None:
        """Call nothing, and leave nothing with the event loop."""
        if self._handle is not None:
            self._handle.cancel()
        self.at, self._rings_at, self._handle = math.inf, math.inf, None

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._rings_at = self.at
        delay = max(self.at - monotonic(), 0)
        self._handle = asyncio.get_running_loop().call_later(delay, self._ring)

    def _ring(self) -> None:
        due = self.at <= max(self._rings_at, monotonic())
        self._rings_at, self._handle = math.inf, None
        if due:
            self.at = math.inf
            self._function()
        elif self.at < math.inf:
            self._arm()
