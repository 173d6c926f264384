"""One alarm on the event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from distributed.metrics import monotonic


class Timer:
    """Calls a function once, at the time set last.

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

    def __repr__(self) -> str:
        return f"<Timer at {self.at:g}>"

    def set(self, at: float) -> None:
        """Set the time, instead of any other; infinite for none."""
        self.cancel()
        if at < math.inf:
            self.at = at
            delay = max(at - monotonic(), 0)
            self._handle = asyncio.get_running_loop().call_later(delay, self._ring)

    def cancel(self) -> None:
        """Call nothing."""
        if self._handle is not None:
            self._handle.cancel()
        self.at, self._handle = math.inf, None

    def _ring(self) -> None:
        self.at, self._handle = math.inf, None
        self._function()
