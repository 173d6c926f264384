"""What it takes to find a result that is cached."""

from __future__ import annotations


class HitCost:
    """What it takes a worker to look up one request, in seconds.

    Examples
    --------
    >>> cost = HitCost()
    >>> for _ in range(100):
    ...     cost.observe(0.016, requests=32)
    >>> round(cost.seconds, 5)
    0.0005
    """

    _WEIGHT = 0.1

    __slots__ = ("seconds",)

    def __init__(self, seconds: float = 2e-4) -> None:
        self.seconds = seconds

    def __repr__(self) -> str:
        return f"<HitCost {1e6 * self.seconds:.0f} µs>"

    def observe(self, seconds: float, requests: int) -> None:
        """Learn from the look-up of a batch."""
        self.seconds += self._WEIGHT * (seconds / requests - self.seconds)
