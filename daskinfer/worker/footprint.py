"""How much of the device's memory forward passes take, by their size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

#: Kinds of inputs that are remembered; beyond, one begins anew.
_KINDS = 1000


class Meter(Protocol):
    """What is asked of a device: see :mod:`daskinfer.device.accelerator`."""

    def allocated(self) -> int:
        """Bytes that this process holds."""

    def room(self) -> int:
        """Bytes that this process could still have."""

    def reset_peak(self) -> None:
        """Begin to watch how much is held."""

    def peak(self) -> int:
        """The most bytes that were held since."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a pass of so many rows took."""

    rows: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class _Known:
    """The smallest and the largest pass of one kind of inputs that were watched."""

    least: _Taken
    most: _Taken
    #: Something has been refused by it: the next pass is watched again.
    doubted: bool = False

    def add(self, taken: _Taken) -> None:
        """Take in what the latest pass took."""
        self.most, self.doubted = taken, False
        if taken.rows <= self.least.rows:
            self.least = taken

    def estimate(self, rows: int) -> int:
        """Bytes of a pass that is larger than any before.

        On the line through both, so that what every pass takes, whatever its size,
        is counted once. No less than the larger one took.
        """
        more = self.most.rows - self.least.rows
        grown = max(self.most.nbytes - self.least.nbytes, 0)
        slope = grown / more if more else 0.0
        return self.most.nbytes + int(slope * (rows - self.most.rows))


class Footprint:
    """Learns what passes take, and asks for room before a size that is new.

    Parameters
    ----------
    device
        Where they run.

    Notes
    -----
    Belongs to the device's thread.
    """

    def __init__(self, device: Meter) -> None:
        self._device = device
        self._known: dict[str, _Known] = {}

    def __repr__(self) -> str:
        return f"<Footprint kinds of inputs: {len(self._known)}>"

    @contextmanager
    def of_pass(self, signature: str, rows: int) -> Iterator[None]:
        """Watch a pass, unless one as large has fitted before.

        Raises
        ------
        MemoryError
            If the device has no room for what it would take.
        """
        known = self._known.get(signature)
        if known is not None and rows > known.most.rows:
            self._ask(known, rows)
        elif known is not None and not known.doubted:
            yield
            return
        before = self._device.allocated()
        self._device.reset_peak()
        yield
        taken = _Taken(rows, max(self._device.peak() - before, 0))
        if known is not None:
            known.add(taken)
            return
        if len(self._known) >= _KINDS:
            self._known.clear()
        self._known[signature] = _Known(taken, taken)

    def _ask(self, known: _Known, rows: int) -> None:
        needed, room = known.estimate(rows), self._device.room()
        if needed <= room:
            return
        # Another model may have been loaded while a pass was watched.
        known.doubted = True
        raise MemoryError(
            f"a pass of {rows} rows would take about {needed:,} bytes, out of "
            f"memory that has room for {room:,}"
        )
