"""How long a batch of so many rows takes: learned per deployment version."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from daskinfer.timing.ceilings import Ceilings
from daskinfer.timing.curve import Curve

__all__ = ["LatencyModel"]


# Seconds; clocks are coarse, and a time of zero has no ratio to anything.
_SHORTEST = 1e-6


@dataclass(slots=True)
class _Bucket:
    """Running means of the batches of about one size: of the time, a geometric one."""

    rows: float
    seconds: float
    #: What is offered as a size. The mean would creep down: sizes below it are sent
    #: when few rows wait, those above it seem no better.
    largest: int
    count: int = 1
    shown_rows: float = 0.0
    shown_seconds: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self.count += 1
        self.largest = max(self.largest, rows)
        weight = max(1 / self.count, LatencyModel.SHAPE_WEIGHT)
        if self.count > 2:
            seconds = _clip(seconds, self.seconds, LatencyModel.LARGEST_STEP)
        self.rows += weight * (rows - self.rows)
        # A geometric mean, as the scales of devices are: of an arithmetic one, most of
        # what is measured falls short, and the scales would sink without end.
        self.seconds *= (seconds / self.seconds) ** weight

    @property
    def moved(self) -> bool:
        """Whether it has drifted away from what the curve in use was built of."""
        return (
            abs(self.seconds - self.shown_seconds) > 0.01 * self.shown_seconds
            or abs(self.rows - self.shown_rows) > 0.02 * self.shown_rows
        )


class LatencyModel:
    """Predicts the execution time of a batch from those that were measured.

    One table of size and time per device class, not a fitted line: real devices have
    steps, and some get slower per row beyond a best size. A factor per device, which
    moves faster than the table, follows drift and devices slower than their class.

    Parameters
    ----------
    max_rows : int
        The largest batch that is ever run in one pass.
    allowed_batch_sizes : tuple of int, optional
        Sorted sizes that batches are padded to.

    Notes
    -----
    Times are execution times measured on the worker, never send-to-answer times.
    The table is made monotone by pooling adjacent violators (Ayer et al., "An
    empirical distribution function for sampling with incomplete information", 1955).
    Not thread-safe; it lives on the scheduler's event loop.

    Examples
    --------
    >>> model = LatencyModel(64)
    >>> model.seed("tcp://10.0.0.1:1", "npu", [(1, 0.010), (64, 0.073)])
    >>> round(model.seconds("tcp://10.0.0.1:1", "npu", 32), 3)
    0.041
    >>> model.sizes("npu"), model.ceiling("npu")
    ([1, 64], 64)
    """

    SHAPE_WEIGHT = 0.1
    SCALE_EXPONENT = 0.25
    # Only the product of scale and table is ever measured. Without this share back
    # to 1, noise would let the two drift apart, and with them all sizes that are not
    # being measured.
    SCALE_LEAK = 0.01
    LARGEST_STEP = 3.0
    SURPRISE = 2.0
    UNKNOWN_SECONDS = 0.005

    def __init__(
        self, max_rows: int, allowed_batch_sizes: tuple[int, ...] | None = None
    ) -> None:
        self.max_rows = max_rows
        self.allowed_batch_sizes = allowed_batch_sizes
        #: Grows when a prediction may have changed; what is derived can be cached.
        self.version = 0
        self._tables: dict[str, dict[int, _Bucket]] = {}
        self._curves: dict[str, Curve] = {}
        self._sizes: dict[str, list[int]] = {}
        self._ceilings = Ceilings(max_rows, allowed_batch_sizes)
        self._exact_scales: dict[str, float] = {}
        self._scales: dict[str, float] = {}
        self._last_ratios: dict[str, float] = {}
        self._called: dict[str, set[int]] = {}
        self._guess = Curve([1], [self.UNKNOWN_SECONDS])

    # -- learning

    def observe(
        self, device: str, device_class: str, rows: int, seconds: float
    ) -> None:
        """Learn from one pass.

        The first call of a size on a device is distrusted: it may hold compilation or
        allocation.

        Parameters
        ----------
        device, device_class : str
            Where it ran.
        rows : int
            Rows of the pass, padding not counted.
        seconds : float
            Its execution time.
        """
        rows = self.padded(rows)
        seconds = max(seconds, _SHORTEST)
        key = self._key(rows)
        table = self._tables.get(device_class)
        called = self._called.setdefault(device, set())
        if key not in called:
            called.add(key)
            if not table:
                if not self._tables:
                    self._guess = Curve([rows], [seconds])
                    self.version += 1
                return
            if seconds > 2 * self.seconds(device, device_class, rows):
                return
        if table is None:
            table = self._tables[device_class] = {}
        bucket = table.get(key)
        scale = self._exact_scales.get(device, 1.0)
        if bucket is not None and bucket.count >= 2:
            known = scale * self.curve(device_class).at(rows)
            ratio = _clip(seconds, known, self.LARGEST_STEP) / known
            scale **= 1 - self.SCALE_LEAK
            scale *= ratio ** self._trust(device, ratio)
            self._set_scale(device, scale)
        self._add(device_class, rows, seconds / scale)

    def seed(
        self, device: str, device_class: str, timings: Iterable[tuple[int, float]]
    ) -> None:
        """Learn from the warm-up of a device, which is trusted.

        Parameters
        ----------
        device, device_class : str
            Where it ran.
        timings : iterable of (int, float)
            Rows and seconds of runs that were not the first of their size.
        """
        known = [(self.padded(rows), max(t, _SHORTEST)) for rows, t in timings]
        if not known:
            return
        if device_class in self._tables:
            curve = self.curve(device_class)
            ratios = sorted(seconds / curve.at(rows) for rows, seconds in known)
            self._set_scale(device, ratios[len(ratios) // 2])
        scale = self._exact_scales.get(device, 1.0)
        called = self._called.setdefault(device, set())
        for rows, seconds in known:
            called.add(self._key(rows))
            self._tables.setdefault(device_class, {})
            self._add(device_class, rows, seconds / scale)

    def out_of_memory(self, device_class: str, rows: int, now: float) -> None:
        """Learn that `rows` do not fit into one pass on devices of a class."""
        if self._ceilings.out_of_memory(device_class, self.padded(rows), now):
            self._ceiling_moved(device_class)

    def fitted(self, device_class: str, rows: int, now: float) -> None:
        """Learn that `rows` did fit: a ceiling rises again, when it is time."""
        if self._ceilings.fitted(device_class, self.padded(rows), now):
            self._ceiling_moved(device_class)

    def _ceiling_moved(self, device_class: str) -> None:
        self._sizes.pop(device_class, None)
        self.version += 1

    def forget(self, device: str) -> None:
        """Drop what is known of one device; its class keeps its table."""
        self._exact_scales.pop(device, None)
        self._last_ratios.pop(device, None)
        self._scales.pop(device, None)
        self._called.pop(device, None)

    # -- asking

    def seconds(self, device: str, device_class: str, rows: int) -> float:
        """Execution time of `rows` on a device.

        More rows than fit into one pass are run as several.
        """
        at, ceiling = self.curve(device_class).at, self.ceiling(device_class)
        full, rest = divmod(rows, ceiling) if rows > ceiling else (0, max(rows, 1))
        seconds = full * at(ceiling) if full else 0.0
        if rest:
            seconds += at(self.padded(rest))
        return self.scale(device) * seconds

    def curve(self, device_class: str) -> Curve:
        """The curve of a class; of another one, or a guess, until it is measured."""
        curve = self._curves.get(device_class)
        if curve is None:
            if device_class in self._tables:
                curve = self._curves[device_class] = self._build(device_class)
            elif self._tables:
                curve = self.curve(next(iter(self._tables)))
            else:
                curve = self._guess
        return curve

    def scale(self, device: str) -> float:
        """How much slower (above 1) or faster a device is than its class.

        In steps of 2 %, so that devices of about one speed can share what is derived.
        """
        return self._scales.get(device, 1.0)

    def sizes(self, device_class: str) -> list[int]:
        """Sizes in rows that were measured and fit, ascending; empty at first."""
        sizes = self._sizes.get(device_class)
        if sizes is None:
            ceiling = self.ceiling(device_class)
            table = self._tables.get(device_class, {})
            measured = sorted(bucket.largest for bucket in table.values())
            sizes = [size for size in measured if size <= ceiling]
            self._sizes[device_class] = sizes
        return sizes

    def top(self, device_class: str) -> int:
        """The largest size measured, 0 if none."""
        sizes = self.sizes(device_class)
        return sizes[-1] if sizes else 0

    def ceiling(self, device_class: str) -> int:
        """The most rows that may go into one pass."""
        return self._ceilings.of(device_class)

    def padded(self, rows: int) -> int:
        """Rows that the model sees when it is given `rows`."""
        allowed = self.allowed_batch_sizes
        if not allowed:
            return rows
        i = bisect_left(allowed, rows)
        return allowed[i] if i < len(allowed) else rows

    def measurements(self, device_class: str, rows: int) -> int:
        """How many batches of about this size have been measured."""
        bucket = self._tables.get(device_class, {}).get(self._key(self.padded(rows)))
        return bucket.count if bucket else 0

    def table(self, device_class: str) -> list[tuple[int, float, int]]:
        """Rows, seconds and number of measurements of each size, for a display."""
        return [
            (round(bucket.rows), bucket.seconds, bucket.count)
            for _, bucket in sorted(self._tables.get(device_class, {}).items())
        ]

    # -- inside

    def _key(self, rows: int) -> int:
        # Steps sit at powers of two: each has a bucket of its own, so that sizes below
        # it do not blur it. Two more lie between it and the next.
        if self.allowed_batch_sizes:
            return rows
        octave = rows.bit_length() - 1
        if rows == 1 << octave:
            return 3 * octave
        return 3 * octave + (1 if rows * rows <= 2 << (2 * octave) else 2)

    def _trust(self, device: str, ratio: float) -> float:
        """How far the scale of a device follows one measurement, as an exponent."""
        before = self._last_ratios.get(device, 1.0)
        self._last_ratios[device] = ratio
        # One surprise may be an outlier; two in a row, in one direction, are a change.
        same_way = (
            min(before, ratio) > self.SURPRISE or max(before, ratio) < 1 / self.SURPRISE
        )
        return 1.0 if same_way else self.SCALE_EXPONENT

    def _set_scale(self, device: str, scale: float) -> None:
        self._exact_scales[device] = scale
        self._scales[device] = math.exp(round(50 * math.log(scale)) / 50)

    def _add(self, device_class: str, rows: int, seconds: float) -> None:
        table = self._tables[device_class]
        key = self._key(rows)
        bucket = table.get(key)
        known = bucket.largest if bucket else 0
        if bucket is None:
            bucket = table[key] = _Bucket(rows, seconds, rows)
        else:
            bucket.add(rows, seconds)
        if bucket.moved or bucket.largest > known:
            self._curves.pop(device_class, None)
            self._sizes.pop(device_class, None)
            self.version += 1

    def _build(self, device_class: str) -> Curve:
        pools: list[tuple[float, int, list[float]]] = []
        for _, bucket in sorted(self._tables[device_class].items()):
            bucket.shown_rows, bucket.shown_seconds = bucket.rows, bucket.seconds
            seconds, weight, rows = bucket.seconds, bucket.count, [bucket.rows]
            while pools and pools[-1][0] > seconds:
                other_seconds, other_weight, other_rows = pools.pop()
                total = weight + other_weight
                seconds = (weight * seconds + other_weight * other_seconds) / total
                weight, rows = total, other_rows + rows
            pools.append((seconds, weight, rows))
        return Curve(
            [row for _, _, rows in pools for row in rows],
            [seconds for seconds, _, rows in pools for _ in rows],
        )

    def __repr__(self) -> str:
        known = {name: len(table) for name, table in self._tables.items()}
        return f"<LatencyModel max_rows={self.max_rows}, sizes measured: {known}>"


def _clip(value: float, around: float, factor: float) -> float:
    return min(max(value, around / factor), around * factor)
