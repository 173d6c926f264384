"""Reasons to keep back a batch that a device could take now."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scheduler_plugins.load import MARGIN, DeviceLoad, Link
from scheduler_plugins.placement import Candidate
from scheduler_plugins.sizing import Rates, Sizer

__all__ = ["ArrivalRate", "Holding"]

_ARRIVAL_WINDOW = 0.2
# Waiting for less than this many seconds is not worth a timer.
_SHORTEST_WAIT = 0.00025
# Looking again costs little; predictions change.
_LONGEST_WAIT = 0.05
# Devices count as faster below this share of the time of a single row.
_FASTER = 0.7


class ArrivalRate:
    """Rows per second, over an exponential window of 200 ms.

    Examples
    --------
    >>> rate = ArrivalRate()
    >>> for i in range(1000):
    ...     rate.arrived(2, i * 0.001)
    >>> round(rate.at(0.999), -2)
    2000.0
    """

    __slots__ = ("_first", "_last", "_value")

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0
        self._value = 0.0

    def arrived(self, rows: int, now: float) -> None:
        """Count `rows` at time `now` (seconds)."""
        if self._first is None:
            self._first = self._last = now
        fade = math.exp(-(now - self._last) / _ARRIVAL_WINDOW)
        self._value = self._value * fade + rows / _ARRIVAL_WINDOW
        self._last = now

    def at(self, now: float) -> float:
        """Rows per second at time `now` (seconds)."""
        if self._first is None:
            return 0.0
        seen = max(now - self._first, 0.001)
        filled = 1 - math.exp(-seen / _ARRIVAL_WINDOW)
        return self._value * math.exp(-(now - self._last) / _ARRIVAL_WINDOW) / filled

    def __repr__(self) -> str:
        return f"<ArrivalRate {self.at(self._last):.0f} rows/s>"


class Holding:
    """Says until when a batch had better wait, or that it need not.

    Parameters
    ----------
    sizer : Sizer
        Knows what batches take on each device.
    link : Link
        What messages take.
    arrivals : ArrivalRate
        How fast rows come in.

    Notes
    -----
    Each wait ends by itself: it is bounded by what some device is predicted to do,
    and a device that does not do it is believed to need longer and longer.
    """

    def __init__(self, sizer: Sizer, link: Link, arrivals: ArrivalRate) -> None:
        self._sizer = sizer
        self._link = link
        self._arrivals = arrivals

    def for_nearer(
        self,
        now: float,
        chosen: Candidate,
        devices: Sequence[DeviceLoad],
        transfer: Callable[[DeviceLoad], float],
    ) -> float | None:
        """Until when to wait for a busy device that has the inputs.

        Moving them may take longer than the batch that is in the way.
        """
        first, nearer = chosen.finishes, None
        for device in devices:
            if device.idle or device is chosen.device:
                continue
            moving = transfer(device)
            if moving >= chosen.transfer:
                continue
            free = device.expected_free(now, self._link)
            starts = max(free, now + self._link.outbound + moving)
            finishes = starts + self._sizer.rates(device).seconds(chosen.rows)
            if finishes < first:
                first, nearer = finishes, free
        return None if nearer is None else self._before(nearer, now)

    def for_faster(
        self,
        now: float,
        waiting: int,
        chosen: Candidate,
        devices: Sequence[DeviceLoad],
    ) -> float | None:
        """Until when to wait for faster devices, if they would empty the queue sooner.

        Sooner than the chosen device would finish this one batch, that is. A faster
        one that is idle could have been chosen, and is too far from the inputs.
        """
        # Beside the round trip, what a tiny batch takes makes no device a faster one.
        trip = self._link.round_trip
        limit = _FASTER * (self._sizer.rates(chosen.device).single + trip)
        faster = [
            (device, rates)
            for device in devices
            if not device.idle
            and (rates := self._sizer.rates(device)).single + trip < limit
        ]
        if not faster:
            return None
        rate, lag, first_free = 0.0, 0.0, math.inf
        for device, rates in faster:
            own_rate = rates.best_rate
            free = device.expected_free(now, self._link)
            free = max(free, now + self._link.outbound)
            rate += own_rate
            lag += own_rate * (free - now)
            first_free = min(first_free, free)
        rates = faster[0][1]
        last_batch = rates.seconds(min(waiting, rates.best_size))
        drain = lag / rate + max(waiting / rate, last_batch)
        # The busier the fast ones are, the less they can be counted on.
        trust = min(max(1 - 0.5 * self._arrivals.at(now) / rate, 0.5), 1.0)
        if drain >= trust * (chosen.finishes - now):
            return None
        return self._before(first_free, now)

    def to_spread(
        self,
        now: float,
        waiting: int,
        rates: Rates,
        devices: Sequence[DeviceLoad],
    ) -> float | None:
        """Until when to wait so that devices start at even distances.

        With u devices that could start now and the next one in r seconds, the total
        wait is least if the next batch starts
        (r - waiting * u / arrival rate) / (u + 1) from now. What is further away than
        one batch takes (another deployment's long batch, or one that hangs) is no
        reason to wait.
        """
        arriving = self._arrivals.at(now)
        if len(devices) == 1 or arriving <= 0:
            return None
        lead = self._link.outbound + MARGIN
        startable, next_start = 0, math.inf
        for device in devices:
            if self._sizer.rates(device).single > 1.5 * rates.single:
                continue
            start = 0.0
            if device.flights:
                start = device.expected_free(now, self._link) - lead - now
            if start <= 1e-5 and not device.full:
                startable += 1
            else:
                next_start = min(next_start, max(start, 0.0))
        if next_start > rates.best_seconds + self._link.round_trip:
            return None
        startable = max(startable, 1)
        wait = (next_start - waiting * startable / arriving) / (startable + 1)
        return now + min(wait, _LONGEST_WAIT) if wait > _SHORTEST_WAIT else None

    def _before(self, free: float, now: float) -> float:
        """When to send so that a device gets it just as it is free."""
        leave = min(free - self._link.outbound - MARGIN, now + _LONGEST_WAIT)
        return max(leave, now + 2 * _SHORTEST_WAIT)

    def __repr__(self) -> str:
        return f"<Holding {self._arrivals!r}>"
