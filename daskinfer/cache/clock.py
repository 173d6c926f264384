"""The two clocks that ages are measured with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Time in seconds, replaceable in tests.

    Parameters
    ----------
    monotonic
        Never goes back; ages within this process are measured with it.
    wall
        Seconds since 1970; what is written to disk is dated with it.

    Examples
    --------
    >>> clock = Clock(monotonic=lambda: 5.0, wall=lambda: 1e9)
    >>> clock.monotonic()
    5.0
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
