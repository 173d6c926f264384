"""When a batch leaves, how many rows it has and which device gets it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from daskinfer.policy import BatchPolicy
from daskinfer.timing.latency import LatencyModel
from scheduler_plugins.holding import ArrivalRate, Holding
from scheduler_plugins.load import MARGIN, DeviceLoad, Flight, Link
from scheduler_plugins.placement import Candidate, Placement
from scheduler_plugins.sizing import Rates, Sizer

__all__ = ["Batcher", "Send", "Wait"]

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
        nothing), ``"timeout"`` (held long enough), ``"probe"``, ``"alone"``,
        ``"retry"`` (a device that was slow may be so no more), ``"try"`` (one that
        was not fit may be so again) or ``"cached"`` (the results are there).
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
        self._holding = Holding(self._sizer, link, self.arrivals)
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
        usable = [d for d in devices if not d.isolated]
        if alone:
            usable = [device for device in usable if device.takes_more(alone)]
        if not usable:
            return Wait(None)
        if now >= self._retry_at and not alone:
            self._retry_at = now + 1.0
            slow = self._slow_for_long(now, usable)
            if slow is not None:
                ceiling = self.latency.ceiling(slow.device_class)
                rows = min(self.policy.min_batch_size, waiting, ceiling)
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
        until = None
        if transfer is not None:
            until = self._holding.for_nearer(now, chosen, usable, transfer)
        if until is None and self.placement.waits_for_faster:
            until = self._holding.for_faster(now, waiting, chosen, usable)
        if until is None and not held and not self._deep(device, rates, waiting):
            until = self._holding.to_spread(now, waiting, rates, usable)
        if until is not None:
            return Wait(min(until, wake))
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
            if device.full or (transfer is not None and device.fetches_enough):
                continue
            rates = sizer.rates(device)
            moving = transfer(device) if transfer else 0.0
            starts = now + outbound + moving
            if device.flights:
                if not rates.measured:
                    continue
                free = device.expected_free(now, link)
                leave = free - outbound - moving - MARGIN
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

    def looked_up(
        self, send: Send, batch_id: str, now: float, *, rows: int, requests: int
    ) -> None:
        """Note that a batch has left that a cache is expected to answer."""
        device = send.device
        predict = partial(self.latency.seconds, device.name, device.device_class, rows)
        device.look_up(Flight(batch_id, rows, now, predict, lookups=requests))

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
        passes = list(passes)
        device.finish(batch_id, now, self.link, ran=bool(passes))
        total = 0.0
        for rows, seconds in passes:
            self.latency.observe(device.name, device.device_class, rows, seconds)
            self.latency.fitted(device.device_class, rows, now)
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
        self.latency.out_of_memory(device.device_class, rows, now)

    def __repr__(self) -> str:
        return f"<Batcher {self.placement!r} {self.latency!r} {self.arrivals!r}>"
