"""What is due when.

Pure: the time is an argument.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import Generic, TypeVar

from dask.typing import Key

K = TypeVar("K", bound=Key)

#: Entries of the past that are kept, at least, before the heap is built anew.
_SLACK = 64


class Deadlines(Generic[K]):
    """Times by key, and which of them have come.

    Notes
    -----
    Most times are later than all that were set before, as those of requests with one
    timeout: these stand in a row, and cost the same however many there are. The others
    are in a heap, in which entries that were discarded stay until they come to the top,
    or are more than half of it. So every operation costs the logarithm of what is set
    at most, amortized, and memory is in proportion to it.

    Examples
    --------
    >>> deadlines = Deadlines()
    >>> deadlines.set("a", 3.0)
    >>> deadlines.set("b", 1.0)
    >>> deadlines.next()
    1.0
    >>> deadlines.discard("b")
    >>> deadlines.expired(now=5.0), len(deadlines)
    (['a'], 0)
    """

    __slots__ = ("_entries", "_heap", "_latest", "_row", "_sets")

    def __init__(self) -> None:
        self._row: OrderedDict[K, float] = OrderedDict()
        self._latest = -math.inf  # of the row
        self._entries: dict[K, tuple[float, int, K]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sets = 0

    def __len__(self) -> int:
        return len(self._row) + len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._row or key in self._entries

    def __repr__(self) -> str:
        return f"<Deadlines set: {len(self)} next: {self.next()}>"

    def set(self, key: K, at: float) -> None:
        """Note when a key is due, instead of any earlier time it had."""
        self.discard(key)
        if at >= self._latest or not self._row:
            self._row[key] = self._latest = at
            return
        # Equal times are told apart, so that keys are never compared.
        self._sets += 1
        entry = self._entries[key] = (at, self._sets, key)
        heapq.heappush(self._heap, entry)

    def discard(self, key: K) -> None:
        """Forget a key, if it is known."""
        in_row = self._row.pop(key, None) is not None
        if not in_row and self._entries.pop(key, None) is not None:
            self._tidy()

    def clear(self) -> None:
        """Forget all keys."""
        self._row.clear()
        self._entries.clear()
        self._heap.clear()

    def keys(self) -> list[K]:
        """All keys, in no particular order."""
        return [*self._row, *self._entries]

    def next(self) -> float:
        """When the first key is due; infinite if there is none."""
        heap = self._heap
        while heap and self._entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        first = next(iter(self._row.values()), math.inf)
        return min(first, heap[0][0]) if heap else first

    def expired(self, now: float) -> list[K]:
        """Take out the keys that are due, first due first."""
        due: list[K] = []
        while (at := self.next()) <= now and self:
            if self._heap and self._heap[0][0] == at:
                key = heapq.heappop(self._heap)[2]
                del self._entries[key]
            else:
                key, _ = self._row.popitem(last=False)
            due.append(key)
        return due

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
