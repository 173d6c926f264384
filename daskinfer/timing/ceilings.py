"""The most rows that fit into one pass: lowered at once, raised again slowly.

Pure: the time is an argument.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

__all__ = ["Ceilings"]

#: Seconds between a ceiling's last change and the first try above it.
FIRST_WAIT = 30.0
#: The wait doubles with each try that fails, up to this.
LONGEST_WAIT = 3600.0
#: A try goes above the ceiling by this share of it.
STEP = 1 / 8


@dataclass(slots=True)
class _Ceiling:
    rows: int
    due: float
    wait: float = FIRST_WAIT
    #: Where to return to while a raise is not proven yet.
    before: int | None = None


class Ceilings:
    """How large passes may be, by device class.

    Rediscovering on every batch what does not fit would cost a failed pass each time;
    never trying again would make a shortage that has passed last for ever.

    Parameters
    ----------
    max_rows : int
        The ceiling of a class that never ran out of memory.
    allowed_batch_sizes : tuple of int, optional
        Ascending sizes that passes are padded to.

    Examples
    --------
    >>> ceilings = Ceilings(64)
    >>> ceilings.out_of_memory("npu", 64, now=0.0), ceilings.of("npu")
    (True, 32)
    >>> ceilings.fitted("npu", 32, now=31.0), ceilings.of("npu")
    (True, 36)
    >>> ceilings.out_of_memory("npu", 36, now=32.0), ceilings.of("npu")
    (True, 32)
    """

    def __init__(
        self, max_rows: int, allowed_batch_sizes: tuple[int, ...] | None = None
    ) -> None:
        self.max_rows = max_rows
        self.allowed_batch_sizes = allowed_batch_sizes
        self._lowered: dict[str, _Ceiling] = {}

    def __repr__(self) -> str:
        lowered = {name: ceiling.rows for name, ceiling in self._lowered.items()}
        return f"<Ceilings max_rows={self.max_rows}, lowered: {lowered}>"

    def of(self, device_class: str) -> int:
        """The most rows that may go into one pass."""
        ceiling = self._lowered.get(device_class)
        return self.max_rows if ceiling is None else ceiling.rows

    def out_of_memory(self, device_class: str, rows: int, now: float) -> bool:
        """Learn that a pass of so many rows did not fit.

        Passes above a ceiling that was lowered while they were under way teach
        nothing new, however many of them fail.

        Returns
        -------
        bool
            Whether the ceiling has changed.
        """
        if rows > self.of(device_class):
            return False
        known = self._lowered.get(device_class)
        if known is None:
            half = self._half(rows)
            self._lowered[device_class] = _Ceiling(half, now + FIRST_WAIT)
            return half != self.max_rows
        was = known.rows
        if known.before is not None and rows > known.before:
            known.rows = known.before
            known.wait = min(2 * known.wait, LONGEST_WAIT)
        else:
            known.rows = self._half(rows)
        known.before = None
        known.due = now + known.wait
        return known.rows != was

    def fitted(self, device_class: str, rows: int, now: float) -> bool:
        """Learn that a pass of so many rows fitted; try more, when it is due.

        Returns
        -------
        bool
            Whether the ceiling has changed.
        """
        known = self._lowered.get(device_class)
        if known is None or rows < known.rows:
            return False
        if known.before is not None:
            known.before = None
            known.wait = FIRST_WAIT
            known.due = now + FIRST_WAIT
            if known.rows >= self.max_rows:
                del self._lowered[device_class]
            return False
        if now < known.due:
            return False
        known.before = known.rows
        known.rows = self._above(known.rows)
        return known.rows != known.before

    def _half(self, rows: int) -> int:
        half = max(rows // 2, 1)
        if not self.allowed_batch_sizes:
            return half
        fitting = [size for size in self.allowed_batch_sizes if size <= half]
        return fitting[-1] if fitting else self.allowed_batch_sizes[0]

    def _above(self, rows: int) -> int:
        above = rows + max(int(rows * STEP), 1)
        if self.allowed_batch_sizes:
            place = bisect_right(self.allowed_batch_sizes, rows)
            above = self.allowed_batch_sizes[
                min(place, len(self.allowed_batch_sizes) - 1)
            ]
        return min(above, self.max_rows)
