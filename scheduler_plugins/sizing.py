"""How many rows the next batch for a device should have."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from daskinfer.policy import BatchPolicy
from daskinfer.timing.latency import LatencyModel
from scheduler_plugins.load import DeviceLoad, Link

__all__ = ["Rates", "Sizer"]

# Sizes within this share of the best rate are as good; the smallest answers earliest.
_TOLERANCE = 0.05
# The same for the size that counts as best when nothing limits it.
_BEST_TOLERANCE = 0.03
# Rows that lengthen a batch by no more than this share ride along for free.
_FREE_RIDE = 0.15
# The same where a size is chosen already, and the rest of the queue might join it.
_SAME = 0.02
# Share of the device time that may be spent on sizes that may turn out worse.
_BUDGET = 0.02
_LARGEST_CREDIT = 2.0
_REMEASURE_EVERY = 64


class Rates:
    """What each measured size yields on devices of one class and speed.

    The rate of a size is its rows per second of device time. A batch costs the device
    its execution time, or its share of the round trip if that is longer: two batches
    are in flight, so one of them is on its way while the other runs.

    Parameters
    ----------
    latency : LatencyModel
        The measurements.
    device_class : str
        Class of the devices.
    scale : float
        How much slower than their class they are.
    round_trip : float
        Seconds of a message to a worker and back.
    limit : float
        Seconds that a batch may take; infinite for no limit.
    """

    def __init__(
        self,
        latency: LatencyModel,
        device_class: str,
        scale: float,
        round_trip: float,
        limit: float = math.inf,
    ) -> None:
        self._curve = latency.curve(device_class)
        self._padded = latency.padded
        self._scale = scale
        self._round_trip = round_trip
        self._limit = limit
        measured = latency.sizes(device_class)
        self.measured = bool(measured)
        if not measured:
            allowed = latency.allowed_batch_sizes
            measured = [allowed[0] if allowed else 1]
        self.sizes = [size for size in measured if self.seconds(size) <= limit]
        self.sizes = self.sizes or measured[:1]
        #: Seconds that a single row takes.
        self.single = self.seconds(1)
        # Best rate up to each size. It never falls, so the smallest size that reaches
        # a rate is found by bisection.
        self._best = list(accumulate(map(self.rate, self.sizes), max))
        #: The best rate of all sizes, in rows per second.
        self.best_rate = self._best[-1]
        best = bisect_left(self._best, (1 - _BEST_TOLERANCE) * self.best_rate)
        #: The smallest size that reaches it, or nearly.
        self.best_size = self.sizes[best]
        #: Seconds of a batch of that size.
        self.best_seconds = self.seconds(self.best_size)
        ride = self._curve.rows_within((1 + _FREE_RIDE) * self._curve.at(1))
        if latency.allowed_batch_sizes:
            fitting = [size for size in self.sizes if size <= ride]
            ride = fitting[-1] if fitting else 1
        #: The most rows that take hardly longer than one.
        self.free_ride = max(ride, 1)

    def seconds(self, rows: int) -> float:
        """Execution time of `rows`, padded if they must be."""
        return self._scale * self._curve.at(self._padded(rows))

    def rate(self, rows: int) -> float:
        """Rows per second of device time."""
        seconds = self.seconds(rows)
        return rows / max(seconds, 0.5 * (seconds + self._round_trip))

    def fastest(self, rows: int) -> int:
        """The smallest size up to `rows` with nearly the best rate.

        Either a measured size, or all of `rows`, padded where need be.
        """
        count = bisect_right(self.sizes, rows)
        if count and self.sizes[count - 1] == rows:
            own = 0.0
        elif count and self.seconds(rows) > self._limit:
            own = 0.0
        else:
            own = self.rate(rows)
        best = max(self._best[count - 1], own) if count else own
        index = bisect_left(self._best, (1 - _TOLERANCE) * best, 0, count)
        if index == count:
            return rows
        size = self.sizes[index]
        return (
            rows
            if own and self.seconds(rows) <= (1 + _SAME) * self.seconds(size)
            else size
        )

    def __repr__(self) -> str:
        return (
            f"<Rates best size {self.best_size}, {self.best_rate:.0f} rows/s "
            f"of sizes {self.sizes}>"
        )


@dataclass(slots=True)
class _Probe:
    device_class: str
    rows: int


class Sizer:
    """Chooses batch sizes by rate, and explores larger ones while there is a queue.

    Parameters
    ----------
    policy : BatchPolicy
        Limits the user has set.
    latency : LatencyModel
        What batches take.
    link : Link
        What messages take.
    """

    def __init__(self, policy: BatchPolicy, latency: LatencyModel, link: Link) -> None:
        self.policy = policy
        self.latency = latency
        self.link = link
        self._target = policy.target_latency
        self._target_holds = self._target is not None
        self._cache: dict[tuple[str, float, bool], Rates] = {}
        self._cached_for: tuple[int, float] = (-1, 0.0)
        self._probes: dict[str, _Probe] = {}
        self._credit = 0.0
        self._sent_since_check = 0
        self._checks = 0

    def rates(self, device: DeviceLoad) -> Rates:
        """The rates of a device, under the target latency while that holds."""
        return self._rates(device, self._target_holds)

    def _rates(self, device: DeviceLoad, limited: bool) -> Rates:
        scale = self.latency.scale(device.name)
        return self._class_rates(device.device_class, scale, limited)

    def _class_rates(self, device_class: str, scale: float, limited: bool) -> Rates:
        version, round_trip = self.latency.version, self.link.round_trip
        known_version, known_trip = self._cached_for
        if version != known_version or abs(round_trip - known_trip) > 0.1 * known_trip:
            self._cache.clear()
            self._cached_for = version, round_trip
        key = device_class, scale, limited
        rates = self._cache.get(key)
        if rates is None:
            limit = self._target if limited and self._target else math.inf
            rates = Rates(self.latency, device_class, scale, round_trip, limit)
            self._cache[key] = rates
        return rates

    def best_size(self, device_class: str) -> int:
        """The size that is worth waiting for while the device is busy, in rows."""
        return self._class_rates(device_class, 1.0, self._target_holds).best_size

    def weigh_target(self, waiting: int, devices: list[DeviceLoad]) -> None:
        """Let the target latency go, or take it back, by the length of the queue.

        A queue that takes longer to drain than the target makes everybody late; then
        throughput helps more than short batches. Taken back at half of that.
        """
        if self._target is None:
            return
        rate = sum(self._rates(device, True).best_rate for device in devices)
        drain = waiting / rate
        self._target_holds = drain <= self._target * (
            1.0 if self._target_holds else 0.5
        )

    def rows(
        self, device: DeviceLoad, rates: Rates, waiting: int, idle: int, devices: int
    ) -> tuple[int, bool]:
        """Rows of the next batch for `device`, and whether the size is a probe.

        Parameters
        ----------
        device : DeviceLoad
            Where the batch would go.
        rates : Rates
            Its rates.
        waiting : int
            Rows that wait.
        idle : int
            Idle devices that are about as fast, which share what waits.
        devices : int
            All devices of the deployment, which share what exploring may cost.
        """
        ceiling = self.latency.ceiling(device.device_class)
        floor = min(self.policy.min_batch_size, waiting, ceiling)
        probe = self._larger(device.device_class, rates, waiting, devices)
        if probe:
            return max(probe, floor), True
        again = self._remeasured(rates, waiting, devices)
        if again:
            return max(again, floor), False
        top = self.latency.top(device.device_class) or rates.sizes[0]
        rows = min(waiting, top, ceiling)
        if idle > 1 and waiting < idle * rates.best_size:
            rows = min(rows, max(-(-waiting // idle), rates.free_ride))
        return max(rates.fastest(rows), floor), False

    def _larger(
        self, device_class: str, rates: Rates, waiting: int, devices: int
    ) -> int:
        """Rows of a batch larger than any measured; 0 if none is worth the risk."""
        top = self.latency.top(device_class)
        # More than `top`, not the next size: a few callers never fill that.
        if waiting <= top:
            return 0
        rows = min(waiting, self._next_size(top, device_class))
        if rows <= top:
            return 0
        small = top < 12
        unanswered = sum(
            probe.rows > top and probe.device_class == device_class
            for probe in self._probes.values()
        )
        if unanswered >= max(1, devices // (2 if small else 4)):
            return 0
        if not top:
            return rows
        if self._target_holds and rates.seconds(rows) > (self._target or math.inf):
            return 0
        affordable = self._budget(rates, waiting, devices) + self._credit
        return rows if self._loss(rates, rows) <= affordable else 0

    def _next_size(self, top: int, device_class: str) -> int:
        ceiling = self.latency.ceiling(device_class)
        allowed = self.latency.allowed_batch_sizes
        if allowed:
            return min(
                allowed[min(bisect_right(allowed, top), len(allowed) - 1)], ceiling
            )
        return min(max(top * (4 if top < 12 else 2), 1), ceiling)

    def _remeasured(self, rates: Rates, waiting: int, devices: int) -> int:
        """A neighbour of the best size, now and then: its time may have changed."""
        best = rates.best_size
        if self._sent_since_check < _REMEASURE_EVERY or waiting <= 4 * best:
            return 0
        near = [n for n in rates.sizes if n != best and best / 4 <= n <= 2.9 * best]
        if not near:
            return 0
        rows = near[self._checks % len(near)]
        if self._loss(rates, rows) > self._budget(rates, waiting, devices):
            return 0
        self._sent_since_check = 0
        self._checks += 1
        return rows

    @staticmethod
    def _loss(rates: Rates, rows: int) -> float:
        """Seconds that a batch takes beyond what the best size needs for its rows."""
        return rates.seconds(rows) - rows / rates.best_rate

    @staticmethod
    def _budget(rates: Rates, waiting: int, devices: int) -> float:
        return _BUDGET * waiting / (rates.best_rate * devices)

    # -- what became of the choices

    def sent(self, batch_id: str, device: DeviceLoad, rows: int, probe: bool) -> None:
        """Note that a batch left."""
        self._sent_since_check += 1
        if probe:
            loss = self._loss(self.rates(device), rows)
            self._credit -= min(max(loss, 0.0), self._credit)
            self._probes[batch_id] = _Probe(device.device_class, rows)

    def answered(self, batch_id: str, seconds: float) -> None:
        """Note that a batch came back after `seconds` of execution (0: it failed)."""
        self._probes.pop(batch_id, None)
        self._credit = min(self._credit + _BUDGET * seconds, _LARGEST_CREDIT)

    def __repr__(self) -> str:
        return f"<Sizer {len(self._probes)} probes, credit {self._credit:.3f}s>"
