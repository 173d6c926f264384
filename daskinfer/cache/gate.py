"""Whether a cache is worth asking."""

from __future__ import annotations

#: Look-ups after which a cache is judged.
WINDOW = 1000
#: Hits per look-up below which it costs more than it saves.
LEAST_RATE = 0.01
#: Seconds until a cache that was given up is tried again; doubled each time ...
FIRST_REST = 30.0
#: ... up to this.
LONGEST_REST = 600.0


class HitGate:
    """Turns the look-ups of a cache off while next to none of them is a hit.

    After :data:`WINDOW` look-ups of which less than :data:`LEAST_RATE` were hits, the
    gate closes, for a time that doubles with each window in a row that was as bad.
    Then another window is let through.

    Notes
    -----
    Pure: time is an argument, in seconds on any monotonic clock. Not thread-safe.

    Examples
    --------
    >>> gate = HitGate()
    >>> gate.is_open(0.0)
    True
    >>> gate.looked_up(lookups=1000, hits=3, now=1.0)
    >>> gate.is_open(1.0), gate.rest(1.0), gate.is_open(31.0)
    (False, 30.0, True)
    """

    __slots__ = ("_closed_until", "_hits", "_lookups", "_rest")

    def __init__(self) -> None:
        self._lookups = self._hits = 0
        self._rest = FIRST_REST
        self._closed_until = -float("inf")

    def __repr__(self) -> str:
        return f"<HitGate closed until {self._closed_until:g}>"

    def is_open(self, now: float) -> bool:
        """Whether the cache is to be asked, and given results to keep."""
        return now >= self._closed_until

    def rest(self, now: float) -> float:
        """Seconds until it is."""
        return max(self._closed_until - now, 0.0)

    def looked_up(self, lookups: int, hits: int, now: float) -> None:
        """Judge the cache by what became of look-ups while it was open."""
        if not self.is_open(now):
            return
        self._lookups += lookups
        self._hits += hits
        if self._lookups < WINDOW:
            return
        if self._hits < LEAST_RATE * self._lookups:
            self._closed_until = now + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        else:
            self._rest = FIRST_REST
        self._lookups = self._hits = 0
