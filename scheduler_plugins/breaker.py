"""The circuit breaker of one worker for one deployment version.

After M. Nygard, "Release It!", 2007. Pure: the time is an argument.
"""

from __future__ import annotations

import math
from enum import Enum

from daskinfer.breaker import BreakerPolicy

__all__ = ["Breaker", "BreakerState"]


class BreakerState(str, Enum):
    """Whether a worker is given requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Whether a worker is given requests of a version, and why not.

    There is none for a worker that is well: when its probe succeeds, it is thrown
    away.

    Parameters
    ----------
    policy
        What the user asked for.

    Attributes
    ----------
    reason
        Why it is not closed; None while it is.
    probe
        The batch that decides, while one is under way.

    Examples
    --------
    >>> breaker = Breaker(BreakerPolicy(cooldown=5.0))
    >>> breaker.open(1.0, "it is late")
    True
    >>> breaker.state(1.0).value, breaker.state(6.0).value, breaker.reason
    ('open', 'half-open', 'it is late')
    >>> breaker.wants_probe(6.0)
    True
    >>> breaker.try_with("batch-7")
    >>> breaker.wants_probe(6.0)
    False
    """

    __slots__ = ("_cooldown", "_policy", "_until", "probe", "reason")

    def __init__(self, policy: BreakerPolicy) -> None:
        self.reason: str | None = None
        self.probe: str | None = None
        self._policy = policy
        self._cooldown = policy.cooldown
        self._until: float | None = None  # None: closed

    def __repr__(self) -> str:
        return f"<Breaker until: {self._until} probe: {self.probe} {self.reason!r}>"

    @property
    def is_closed(self) -> bool:
        """Whether requests are given as if nothing had happened."""
        return self._until is None

    def state(self, now: float) -> BreakerState:
        """Its state at a time."""
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    def wants_probe(self, now: float) -> bool:
        """Whether one request may be sent to see."""
        return self.probe is None and self.state(now) is BreakerState.HALF_OPEN

    def next(self) -> float:
        """When it wants a probe; infinite if it is closed or one is under way."""
        if self._until is None or self.probe is not None:
            return math.inf
        return self._until

    # What happens

    def open(self, now: float, reason: str) -> bool:
        """Open at once, for twice as long as the last time; tell whether it has.

        What becomes known while it is open changes nothing: that was sent before.
        """
        if self.state(now) is BreakerState.OPEN:
            return False
        self._until = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, self._policy.max_cooldown)
        self.reason, self.probe = reason, None
        return True

    def doubt(self, now: float, reason: str) -> bool:
        """Let one request decide whether a closed one stays closed."""
        if not self.is_closed:
            return False
        self._until, self.reason = now, reason
        return True

    def try_with(self, batch_id: str) -> None:
        """Note the batch that decides."""
        self.probe = batch_id
