"""A limit to what is sent in a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Says how long to wait before something is sent.

    Parameters
    ----------
    rate
        Bytes per second; None sets no limit.

    Examples
    --------
    >>> pace = Pace(100.0)
    >>> pace.delay(50, now=10.0), pace.delay(50, now=10.0), pace.delay(50, now=20.0)
    (0.5, 1.0, 0.5)
    """

    rate: float | None
    _free_at: float = 0.0

    def delay(self, nbytes: int, now: float) -> float:
        """Seconds from now until so many more bytes may have been sent."""
        if self.rate is None:
            return 0.0
        self._free_at = max(self._free_at, now) + nbytes / self.rate
        return self._free_at - now
