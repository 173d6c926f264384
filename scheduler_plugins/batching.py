"""When a batch leaves, how many rows it has and which device gets it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from daskinfer.policy import BatchPolicy
from scheduler_plugins.latency import LatencyModel
from scheduler_plugins.load import DeviceLoad, Flight, Link
from scheduler_plugins.placement import Candidate, Placement
from scheduler_plugins.sizing import Rates, Sizer

__all__ = ["Batcher", "Send", "Wait"]

# One batch runs while the next is on its way; more would only make batches small.
_IN_FLIGHT = 2
# The next batch should be there this many seconds before the device is free. Late is
# far worse than early, and a share of the batch's time on top is worse than none.
_MARGIN = 0.001
# Waiting for less than this many seconds is not worth a timer.
_SHORTEST_WAIT = 0.00025
_LONGEST_WAIT_FOR_FASTER = 0.05
_ARRIVAL_WINDOW = 0.2
# A device that was found to be much slower than its class gets no work while others
# keep up. After this many seconds it is given the least possible, to see.
_RETRY_SLOW_AFTER = 30.0
_MUCH_SLOWER = 1.5


@dataclass(frozen=True, slots=True)
class Send:
    """Send a batch of `rows` to `device` now.

    Parameters
    ----------
    device : DeviceLoad
        Where to.
    rows : int
        How many of the waiting rows; the last request may have to be split.
    probe : bool
        Whether this size was never measured on this class of device.
    reason : str
        Why now, for logs and dashboards: ``"full"`` (the best size is waiting),
        ``"idle"`` (a device has nothing to do), ``"prefetch"`` (it soon will have
        nothing), ``"timeout"`` (held long enough), ``"probe"``, ``"alone"`` or
        ``"retry"`` (a device that was slow may be so no more).
    """

    device: DeviceLoad
    rows: int
    probe: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Send nothing now.

    Parameters
    ----------
    until : float or None
        Monotonic time in seconds to decide again; None: when something happens (an
        arrival, an answer, a device that joins).
    """

    until: float | None


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


class Batcher:
    """Decides for one deployment version when which device gets how many rows.

    Requests wait in the scheduler until a device wants them. An idle device is served
    at once; a busy one just in time, so that its next batch arrives as the current one
    ends. With several devices, batches are held back a little where that spreads their
    starts. There is no other window: with one device, waiting gains nothing.

    Parameters
    ----------
    policy : BatchPolicy
        What the user asked for.
    latency : LatencyModel
        What batches of this version take; learned from the answers.
    placement : Placement
        Chooses between devices.
    link : Link
        What messages take; shared by all deployments.

    Notes
    -----
    Pure: time is an argument, in seconds on any monotonic clock, and nothing is sent
    here. Call :meth:`decide` after every event that may matter, once all requests of a
    message are queued, and again after each :class:`Send`, until it answers
    :class:`Wait`. Not thread-safe; it lives on the scheduler's event loop.

    Examples
    --------
    >>> from scheduler_plugins.placement import LeastLoaded
    >>> latency, device = LatencyModel(64), DeviceLoad("tcp://10.0.0.1:1", "npu")
    >>> latency.seed(device.name, "npu", [(1, 0.020), (64, 0.052)])
    >>> batcher = Batcher(BatchPolicy(), latency, LeastLoaded(), Link())
    >>> batcher.arrived(40, now=10.0)
    >>> send = batcher.decide(10.0, waiting=40, oldest=10.0, devices=[device])
    >>> send.rows, send.reason
    (40, 'idle')
    >>> batcher.sent(send, "batch-1", now=10.0)
    >>> batcher.completed("batch-1", device, [(40, 0.041)], now=10.046)
    """

    def __init__(
        self,
        policy: BatchPolicy,
        latency: LatencyModel,
        placement: Placement,
        link: Link,
    ) -> None:
        self.policy = policy
        self.latency = latency
        self.placement = placement
        self.link = link
        self.arrivals = ArrivalRate()
        self._sizer = Sizer(policy, latency, link)
        self._last_sent: WeakKeyDictionary[DeviceLoad, float] = WeakKeyDictionary()
        self._retry_at = 0.0

    def arrived(self, rows: int, now: float) -> None:
        """Note that `rows` were queued."""
        self.arrivals.arrived(rows, now)

    def best_size(self, device_class: str) -> int:
        """The smallest size with nearly the best throughput, in rows."""
        return self._sizer.best_size(device_class)

    # -- deciding

    def decide(
        self,
        now: float,
        *,
        waiting: int,
        oldest: float,
        devices: Sequence[DeviceLoad],
        transfer: Callable[[DeviceLoad], float] | None = None,
        alone: bool = False,
    ) -> Send | Wait:
        """Decide what to do with the rows that wait.

        Parameters
        ----------
        now : float
            Monotonic time in seconds.
        waiting : int
            Rows that wait and may share a pass.
        oldest : float
            Arrival of the first of them.
        devices : sequence of DeviceLoad
            Those that may serve them, with the flights of all deployments.
        transfer : callable, optional
            Seconds that moving the inputs to a device takes.
        alone : bool
            The batch may share a device with no other: neither before nor behind it.

        Returns
        -------
        Send or Wait
            No batch has more rows than ``policy.max_batch_size``. If a device is idle,
            a Wait always has a time.
        """
        if waiting <= 0:
            return Wait(None)
        held = waiting < self.policy.min_batch_size
        if held and not alone and now < oldest + self.policy.hold:
            return Wait(oldest + self.policy.hold)
        usable = [d for d in devices if not (d.flights and d.flights[-1].alone)]
        if alone:
            usable = [device for device in usable if device.idle]
        if not usable:
            return Wait(None)
        if now >= self._retry_at and not alone:
            self._retry_at = now + 1.0
            slow = self._slow_for_long(now, usable)
            if slow is not None:
                rows = min(self.policy.min_batch_size, waiting)
                return Send(slow, rows, False, "retry")
        self._sizer.weigh_target(waiting, usable)
        candidates, wake = self._candidates(now, waiting, usable, transfer)
        if not candidates:
            return Wait(wake if wake < math.inf else None)
        chosen = self.placement.choose(candidates, now)
        device, rows = chosen.device, chosen.rows
        rates = self._sizer.rates(device)
        if alone:
            ceiling = self.latency.ceiling(device.device_class)
            return Send(device, min(waiting, ceiling), False, "alone")
        if chosen.probe:
            return Send(device, rows, True, "probe")
        if self.placement.waits_for_faster:
            until = self._wait_for_faster(now, waiting, chosen, rates, usable)
            if until is not None:
                return Wait(min(until, wake))
        if len(usable) > 1 and not held and not self._deep(device, rates, waiting):
            spread = self._spread_starts(now, waiting, rates, usable)
            if spread > _SHORTEST_WAIT:
                return Wait(min(now + spread, wake))
        if held:
            reason = "timeout"
        elif waiting >= rates.best_size:
            reason = "full"
        else:
            reason = "idle" if device.idle else "prefetch"
        return Send(device, rows, False, reason)

    def _slow_for_long(
        self, now: float, devices: list[DeviceLoad]
    ) -> DeviceLoad | None:
        """An idle device that was too slow when it was last used, long ago."""
        for device in devices:
            if device.flights or self.latency.scale(device.name) < _MUCH_SLOWER:
                continue
            if now - self._last_sent.setdefault(device, now) > _RETRY_SLOW_AFTER:
                return device
        return None

    def _candidates(
        self,
        now: float,
        waiting: int,
        devices: list[DeviceLoad],
        transfer: Callable[[DeviceLoad], float] | None,
    ) -> tuple[list[Candidate], float]:
        """The devices that may take a batch now, and when the next one may."""
        link, sizer = self.link, self._sizer
        outbound = link.outbound
        idle = sorted(sizer.rates(d).single for d in devices if not d.flights)
        # Devices with the same rates are given the same size.
        sizes: dict[Rates, tuple[int, bool, float]] = {}
        candidates, wake = [], math.inf
        for device in devices:
            in_flight = len(device.flights)
            if in_flight >= _IN_FLIGHT:
                continue
            rates = sizer.rates(device)
            moving = transfer(device) if transfer else 0.0
            starts = now + outbound + moving
            if in_flight:
                if not rates.measured:
                    continue
                free = device.expected_free(now, link)
                leave = free - outbound - moving - _MARGIN
                if now < leave and not self._deep(device, rates, waiting):
                    wake = min(wake, leave)
                    continue
                starts = max(starts, free)
            size = sizes.get(rates)
            if size is None:
                peers = bisect_right(idle, 1.5 * rates.single)
                rows, probe = sizer.rows(device, rates, waiting, peers, len(devices))
                size = sizes[rates] = rows, probe, rates.seconds(rows)
            rows, probe, seconds = size
            candidates.append(
                Candidate(device, rows, probe, starts, starts + seconds, moving)
            )
        return candidates, wake

    def _deep(self, device: DeviceLoad, rates: Rates, waiting: int) -> bool:
        """Whether nothing is gained by letting the queue grow.

        A best batch waits, and larger ones are known to be no better.
        """
        if waiting < rates.best_size:
            return False
        top = self.latency.top(device.device_class)
        ceiling = self.latency.ceiling(device.device_class)
        return rates.best_size < top or top >= ceiling or waiting >= 2 * top

    def _wait_for_faster(
        self,
        now: float,
        waiting: int,
        chosen: Candidate,
        rates: Rates,
        devices: list[DeviceLoad],
    ) -> float | None:
        """When to look again, if faster devices would empty the queue sooner."""
        limit = 0.7 * rates.single
        faster = [
            (device, fast)
            for device in devices
            if (fast := self._sizer.rates(device)).single < limit
        ]
        if not faster:
            return None
        rate, lag, first_free = 0.0, 0.0, math.inf
        for device, fast in faster:
            own_rate = fast.best_size / fast.best_seconds
            free = max(now + self.link.outbound, device.expected_free(now, self.link))
            rate += own_rate
            lag += own_rate * (free - now)
            first_free = min(first_free, free)
        fast = faster[0][1]
        drain = lag / rate + max(
            waiting / rate, fast.seconds(min(waiting, fast.best_size))
        )
        # The busier the fast ones are, the less they can be counted on.
        trust = min(max(1 - 0.5 * self.arrivals.at(now) / rate, 0.5), 1.0)
        if drain >= trust * (chosen.finishes - now):
            return None
        leave = first_free - self.link.outbound - _MARGIN
        return max(now + 0.0005, min(leave, now + _LONGEST_WAIT_FOR_FASTER))

    def _spread_starts(
        self, now: float, waiting: int, rates: Rates, devices: list[DeviceLoad]
    ) -> float:
        """Seconds to hold back so that the devices start at even distances.

        With u devices that could start now and the next one in r seconds, the total
        wait is least if the next batch starts
        (r - waiting * u / arrival rate) / (u + 1) from now. What is further away than
        one batch takes (another deployment's long batch, or one that hangs) is no
        reason to wait.
        """
        arriving = self.arrivals.at(now)
        if arriving <= 0:
            return 0.0
        lead = self.link.outbound + _MARGIN
        startable, next_start = 0, math.inf
        for device in devices:
            if self._sizer.rates(device).single > 1.5 * rates.single:
                continue
            start = 0.0
            if device.flights:
                start = device.expected_free(now, self.link) - lead - now
            if start <= 1e-5 and len(device.flights) < _IN_FLIGHT:
                startable += 1
            else:
                next_start = min(next_start, max(start, 0.0))
        if next_start == math.inf:
            return 0.0
        startable = max(startable, 1)
        if next_start > rates.best_seconds + self.link.round_trip:
            return 0.0
        return (next_start - waiting * startable / arriving) / (startable + 1)

    # -- what became of the decisions

    def sent(
        self, send: Send, batch_id: str, now: float, rows: int | None = None
    ) -> None:
        """Note that a batch has left; its device is loaded with it.

        Parameters
        ----------
        send : Send
            The decision.
        batch_id : str
            A name for the batch, unique in the cluster.
        now : float
            Monotonic time in seconds.
        rows : int, optional
            How many rows it really has, if not what was decided.
        """
        device = send.device
        rows = send.rows if rows is None else rows
        self._sizer.sent(batch_id, device, rows, send.probe)
        predict = partial(self.latency.seconds, device.name, device.device_class, rows)
        alone = send.reason == "alone"
        self._last_sent[device] = now
        device.send(Flight(batch_id, rows, now, predict, alone))

    def completed(
        self,
        batch_id: str,
        device: DeviceLoad,
        passes: Iterable[tuple[int, float]],
        now: float,
    ) -> None:
        """Learn from a batch that was answered.

        Parameters
        ----------
        batch_id, device
            As given to :meth:`sent`.
        passes : iterable of (int, float)
            Rows (padding not counted) and execution seconds of each forward pass.
        now : float
            Monotonic time in seconds.
        """
        device.finish(batch_id, now, self.link)
        total = 0.0
        for rows, seconds in passes:
            self.latency.observe(device.name, device.device_class, rows, seconds)
            total += seconds
        self._sizer.answered(batch_id, total)

    def lost(self, batch_id: str, device: DeviceLoad, now: float) -> None:
        """Note that a batch failed, or that its worker is gone; nothing is learned."""
        device.finish(batch_id, now, self.link)
        self._sizer.answered(batch_id, 0.0)

    def out_of_memory(
        self, batch_id: str, device: DeviceLoad, rows: int, now: float
    ) -> None:
        """Learn that a pass of `rows` did not fit on a device."""
        self.lost(batch_id, device, now)
        self.latency.out_of_memory(device.device_class, rows)

    def __repr__(self) -> str:
        return (
            f"<Batcher {self.placement!r} {self.latency!r} "
            f"arrivals={self.arrivals.at(self.arrivals._last):.0f}/s>"
        )
