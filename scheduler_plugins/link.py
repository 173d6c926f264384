"""What messages between the scheduler and its workers take. Pure."""

from __future__ import annotations


class Link:
    """The measured cost of a message to a worker and back, in seconds.

    Parameters
    ----------
    outbound : float
        From the decision on the scheduler to the start of the batch on the worker.
    round_trip : float
        The same, plus the way back to the scheduler.

    Notes
    -----
    Not thread-safe; it lives on the scheduler's event loop.

    Examples
    --------
    >>> link = Link()
    >>> for _ in range(100):
    ...     link.observe(0.010)
    >>> round(link.round_trip, 4), round(link.outbound, 4)
    (0.01, 0.006)
    """

    _WEIGHT = 0.05
    _LARGEST_STEP = 3.0
    _FLOOR = 1e-4

    __slots__ = ("_outbound_share", "round_trip")

    def __init__(self, outbound: float = 0.003, round_trip: float = 0.005) -> None:
        if not 0 < outbound < round_trip:
            raise ValueError(
                f"outbound must lie between 0 and round_trip, got {outbound} "
                f"and {round_trip}"
            )
        self.round_trip = round_trip
        self._outbound_share = outbound / round_trip

    @property
    def outbound(self) -> float:
        """Seconds from the decision to the start of the batch on an idle worker."""
        return self._outbound_share * self.round_trip

    @property
    def inbound(self) -> float:
        """Seconds from the end of the batch until the scheduler knows of it."""
        return self.round_trip - self.outbound

    def observe(self, overhead_seconds: float) -> None:
        """Learn from one answered batch.

        Parameters
        ----------
        overhead_seconds : float
            Time from sending to answer, less the execution time, less the time that
            the batch was queued on the worker. An outlier moves the estimate no
            further than three times the estimate would.
        """
        known = self.round_trip
        value = min(overhead_seconds, self._LARGEST_STEP * known)
        self.round_trip = max(known + self._WEIGHT * (value - known), self._FLOOR)

    def __repr__(self) -> str:
        return (
            f"<Link outbound={1e3 * self.outbound:.2f}ms "
            f"round_trip={1e3 * self.round_trip:.2f}ms>"
        )
