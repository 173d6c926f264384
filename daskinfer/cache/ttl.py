"""A mapping that knows what has outlived its time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

from zict.common import ZictBase, locked

KT = TypeVar("KT")
VT = TypeVar("VT")

#: Superseded deadlines that are kept before the heap is built anew.
_SLACK = 64


class TTL(ZictBase[KT, VT]):
    """Give each element of a mapping a time to live.

    An element that has outlived its time stays until its owner takes it away, which may
    want to keep it elsewhere: :meth:`overdue` names one, :meth:`outlived` asks for a
    certain one, and :meth:`next_deadline` tells when there is something to do.

    Parameters
    ----------
    d : MutableMapping
        What holds the elements.
    ttl : float
        Seconds; ``math.inf`` for no limit.
    clock : callable
        Returns the present time in seconds.
    born : callable, optional
        ``key, value -> float``: since when the element lives. If left out, its time
        starts anew each time that it is set or read.

    Notes
    -----
    Thread-safe. Setting, reading and deleting take O(log n) at most, on average.

    Examples
    --------
    >>> now = 0.0
    >>> d = TTL({}, 60.0, lambda: now)
    >>> d["x"] = 1
    >>> d.next_deadline()
    60.0
    >>> now = 60.0
    >>> d.overdue(now)
    'x'
    >>> d["x"], d.outlived("x", now)
    (1, False)
    """

    def __init__(
        self,
        d: MutableMapping[KT, VT],
        ttl: float,
        clock: Callable[[], float],
        *,
        born: Callable[[KT, VT], float] | None = None,
    ) -> None:
        super().__init__()
        self.d = d
        self.ttl = ttl
        self.clock = clock
        self.born = born
        self._deadlines: dict[KT, float] = {}
        # One deadline of each key at least, some of them too early: reading an
        # element moves its own deadline only. Numbered, as keys need no order.
        self._heap: list[tuple[float, int, KT]] = []
        self._number = 0
        for key, value in d.items():
            self._start(key, value)

    def _start(self, key: KT, value: VT) -> None:
        if math.isinf(self.ttl):
            return
        since = self.clock() if self.born is None else self.born(key, value)
        known = self._deadlines.get(key)
        self._deadlines[key] = deadline = since + self.ttl
        if known is None or deadline < known:
            self._push(deadline, key)

    def _push(self, deadline: float, key: KT) -> None:
        self._number += 1
        heapq.heappush(self._heap, (deadline, self._number, key))
        if len(self._heap) > 2 * len(self._deadlines) + _SLACK:
            self._heap = [
                (when, number, key)
                for number, (key, when) in enumerate(self._deadlines.items())
            ]
            self._number = len(self._heap)
            heapq.heapify(self._heap)

    @locked
    def next_deadline(self) -> float | None:
        """When the next element will have outlived its time; None if none ever will."""
        while self._heap:
            deadline, _, key = self._heap[0]
            actual = self._deadlines.get(key)
            if actual == deadline:
                return deadline
            heapq.heappop(self._heap)
            if actual is not None and actual > deadline:
                self._push(actual, key)
        return None

    @locked
    def outlived(self, key: KT, now: float) -> bool:
        """Whether an element is there and has outlived its time."""
        return self._deadlines.get(key, math.inf) <= now

    def overdue(self, now: float) -> KT | None:
        """The key of what has outlived its time for longest; None if nothing has."""
        with self.lock:
            deadline = self.next_deadline()
            return None if deadline is None or deadline > now else self._heap[0][2]

    @locked
    def __getitem__(self, key: KT) -> VT:
        value = self.d[key]
        if self.born is None:
            self._start(key, value)
        return value

    @locked
    def __setitem__(self, key: KT, value: VT) -> None:
        self.d[key] = value
        self._start(key, value)

    @locked
    def __delitem__(self, key: KT) -> None:
        del self.d[key]
        self._deadlines.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self.d

    def __iter__(self) -> Iterator[KT]:
        return iter(self.d)

    def __len__(self) -> int:
        return len(self.d)

    def __str__(self) -> str:
        sub: Any = "dict" if isinstance(self.d, dict) else self.d
        return f"<TTL: {len(self)} elements, {self.ttl:g} s on {sub}>"

    __repr__ = __str__
