"""The policies that are compared: ours, ours with foresight, and what servers do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.sim.arrivals import Lcg
from benchmarks.sim.curves import Shape
from daskinfer.policy import BatchPolicy
from daskinfer.timing.latency import LatencyModel
from scheduler_plugins.batching import Batcher, Send, Wait
from scheduler_plugins.load import DeviceLoad, Flight, Link
from scheduler_plugins.placement import LeastLoaded, Placement

__all__ = ["BentoML", "Greedy", "foresight", "learned"]


def _limits(shape: Shape, policy: BatchPolicy | None) -> BatchPolicy:
    return policy or BatchPolicy(
        max_batch_size=shape.max_rows, allowed_batch_sizes=shape.allowed
    )


def learned(
    shape: Shape,
    slowness: Sequence[float] = (1.0,),
    *,
    warm: bool = True,
    policy: BatchPolicy | None = None,
    placement: type[Placement] = LeastLoaded,
) -> Callable[[Sequence[DeviceLoad]], Batcher]:
    """Ours: the real code, seeded with imprecise warm-up timings if `warm`."""

    def build(devices: Sequence[DeviceLoad]) -> Batcher:
        limits = _limits(shape, policy)
        latency = LatencyModel(limits.max_batch_size, limits.allowed_batch_sizes)
        random = Lcg(5)
        powers = [2**i for i in range(10) if 2**i <= limits.max_batch_size]
        sizes = (limits.allowed_batch_sizes or powers) if warm else ()
        for device, slow in zip(devices, slowness, strict=True):
            timings = [
                (rows, slow * shape.at(rows) * (0.9 + 0.25 * random.uniform()))
                for rows in sizes
                for _ in range(2)
            ]
            latency.seed(device.name, device.device_class, timings)
        return Batcher(limits, latency, placement(), Link())

    return build


class _TrueLatency(LatencyModel):
    """Knows the curve, and what changes on the way."""

    def __init__(
        self,
        shape: Shape,
        devices: Sequence[DeviceLoad],
        slowness: Sequence[float],
        change: Callable[[int, float], float] | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(shape.max_rows, shape.allowed)
        self._index = {device.name: i for i, device in enumerate(devices)}
        self._change = change
        self._clock = clock
        powers = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        between = (3, 6, 12, 24, 48, 96, 192, 384)
        sizes = shape.allowed or sorted(
            size for size in powers + between if size <= shape.max_rows
        )
        for device, slow in zip(devices, slowness, strict=True):
            timings = [(rows, slow * shape.at(rows)) for rows in sizes]
            self.seed(device.name, device.device_class, timings)

    def observe(
        self, device: str, device_class: str, rows: int, seconds: float
    ) -> None:
        """Learn nothing."""

    def scale(self, device: str) -> float:
        if self._change is None:
            return 1.0
        return self._change(self._index[device], self._clock())


class _Clocked(Batcher):
    """Tells its latency model the time."""

    time = 0.0

    def decide(self, now: float, **situation: Any) -> Send | Wait:
        self.time = now
        return super().decide(now, **situation)


def foresight(
    shape: Shape,
    slowness: Sequence[float] = (1.0,),
    change: Callable[[int, float], float] | None = None,
) -> Callable[[Sequence[DeviceLoad]], Batcher]:
    """Ours with the true times, changes included: what learning could reach."""

    def build(devices: Sequence[DeviceLoad]) -> Batcher:
        latency = _TrueLatency(shape, devices, slowness, change, lambda: batcher.time)
        batcher = _Clocked(_limits(shape, None), latency, LeastLoaded(), Link())
        return batcher

    return build


class Greedy:
    """All that waits goes to the first free device: the rule of most servers.

    Parameters
    ----------
    max_rows : int
        The largest batch.
    in_flight : int
        Batches that a device is given at a time.
    window : float
        Seconds from the first queued arrival that a batch is held to become full.
    fixed : int, optional
        The only batch size; fewer rows leave 100 ms after the first of them came.
    """

    def __init__(
        self,
        max_rows: int,
        *,
        in_flight: int = 1,
        window: float = 0.0,
        fixed: int | None = None,
    ) -> None:
        self.link = Link()
        self.max_rows = fixed or max_rows
        self.in_flight = in_flight
        self.window = 0.1 if fixed else window

    def __call__(self, devices: Sequence[DeviceLoad]) -> Greedy:
        """Use it for `devices`."""
        return self

    def arrived(self, rows: int, now: float) -> None:
        """Note an arrival."""

    def decide(
        self,
        now: float,
        *,
        waiting: int,
        oldest: float,
        devices: Sequence[DeviceLoad],
    ) -> Send | Wait:
        """Send as many rows as possible to the device with the fewest batches."""
        device = min(devices, key=lambda load: (len(load.flights), load.last_sent))
        if len(device.flights) >= self.in_flight:
            return Wait(None)
        if waiting < self.max_rows and now < oldest + self.window:
            return Wait(oldest + self.window)
        return Send(device, min(waiting, self.max_rows), False, "idle")

    def sent(self, send: Send, batch_id: str, now: float) -> None:
        """Note a batch that left."""
        send.device.send(Flight(batch_id, send.rows, now, lambda: 0.0))

    def completed(
        self,
        batch_id: str,
        device: DeviceLoad,
        passes: Iterable[tuple[int, float]],
        now: float,
    ) -> None:
        """Note an answer."""
        device.finish(batch_id, now, self.link)

    def out_of_memory(
        self, batch_id: str, device: DeviceLoad, rows: int, now: float
    ) -> None:
        """Halve the largest batch."""
        device.finish(batch_id, now, self.link)
        self.max_rows = max(min(self.max_rows, rows) // 2, 1)


class BentoML(Greedy):
    """BentoML's dispatcher: holds while waiting is cheaper than the last ones found.

    It fits time = a * rows + b to its last batches every five seconds, and holds a
    batch while ``rows * (time since the last arrival + tick + a)`` is below the
    average wait (bentoml/_internal/marshal/dispatcher.py, read and written anew).
    """

    _TICK = 0.001

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows)
        self._history: deque[tuple[int, float, float]] = deque(maxlen=50)
        self._left: dict[str, tuple[float, float]] = {}
        self._oldest = self._last_arrival = 0.0
        self._answers = 0
        self._refitted = float("-inf")
        self._per_row, self._wait = 0.002, 0.01

    def arrived(self, rows: int, now: float) -> None:
        self._last_arrival = now

    def decide(
        self,
        now: float,
        *,
        waiting: int,
        oldest: float,
        devices: Sequence[DeviceLoad],
    ) -> Send | Wait:
        self._oldest = oldest
        decision = super().decide(now, waiting=waiting, oldest=oldest, devices=devices)
        if isinstance(decision, Send) and self._answers > 8 and waiting < self.max_rows:
            cost = now - self._last_arrival + self._TICK + self._per_row
            if waiting * cost <= 0.95 * self._wait:
                return Wait(now + self._TICK)
        return decision

    def sent(self, send: Send, batch_id: str, now: float) -> None:
        super().sent(send, batch_id, now)
        self._left[batch_id] = now, now - self._oldest

    def completed(
        self,
        batch_id: str,
        device: DeviceLoad,
        passes: Iterable[tuple[int, float]],
        now: float,
    ) -> None:
        super().completed(batch_id, device, passes, now)
        left, waited = self._left.pop(batch_id)
        rows = sum(rows for rows, _ in passes)
        self._answers += 1
        if self._answers > 2:
            self._history.append((rows, now - left, waited))
        if self._history and (now - self._refitted >= 5 or self._answers == 11):
            self._refitted = now
            self._refit()

    def _refit(self) -> None:
        n = len(self._history)
        rows = sum(r for r, _, _ in self._history) / n
        seconds = sum(s for _, s, _ in self._history) / n
        spread = sum((r - rows) ** 2 for r, _, _ in self._history)
        if spread:
            shared = sum((r - rows) * (s - seconds) for r, s, _ in self._history)
            slope = shared / spread
        else:
            slope = seconds * rows / (rows * rows + 1)
        self._per_row = max(slope, 1e-9)
        self._wait = sum(waited for _, _, waited in self._history) / n
