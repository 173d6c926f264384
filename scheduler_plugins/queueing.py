"""Who waits, and in what order.

Requests that may share a forward pass wait in one *lane*: same deployment and
version, same input signature, same constraint on where to run. Within a lane they
are served by *virtual arrival*: a request of priority ``p`` counts as if it had
arrived ``p x priority_age`` seconds earlier. So a higher priority overtakes, and
nobody waits for ever: whatever arrives late enough stands behind.

Pure: no clock, no event loop, no Dask.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import TypeAlias

from scheduler_plugins.request import Entry, Request


class Lane:
    """Requests that may share a forward pass, first come first.

    Examples
    --------
    >>> lane = Lane("float32[784]")
    >>> lane.push(Request("a", "m", None, 0.0, rows=3, order=(0.0, 0)))
    >>> lane.push(Request("b", "m", None, 0.0, rows=9, order=(0.0, 1)))
    >>> lane.rows
    12
    >>> [request.key for request in lane.take(8)]
    ['a']
    """

    __slots__ = ("_heap", "_pushes", "count", "key", "rows")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.rows = 0
        self.count = 0
        self._pushes = 0
        self._heap: list[Entry] = []

    def __repr__(self) -> str:
        return f"<Lane {self.key!r} waiting: {self.count} rows: {self.rows}>"

    def __len__(self) -> int:
        return self.count

    def push(self, request: Request) -> None:
        """Let a request wait here."""
        assert request.order is not None
        self.rows += request.rows
        self.count += 1
        # The same request may have an older, abandoned entry: never compare requests.
        self._pushes += 1
        request._entry = (request.order, self._pushes, request)
        heapq.heappush(self._heap, request._entry)

    def remove(self, request: Request) -> None:
        """Let go of a request wherever it stands."""
        request._entry = None
        self.rows -= request.rows
        self.count -= 1

    def head(self) -> Request | None:
        """The request that is served next."""
        heap = self._heap
        while heap and heap[0][2]._entry is not heap[0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def requests(self) -> list[Request]:
        """Everybody who waits here, in no particular order."""
        return [entry[2] for entry in self._heap if entry[2]._entry is entry]

    def take(self, rows: int) -> list[Request]:
        """Remove requests from the front, as many as ``rows`` can hold.

        The first is taken whatever its size: a worker cuts it into passes.
        """
        taken: list[Request] = []
        while (request := self.head()) is not None:
            if taken and request.rows > rows:
                break
            heapq.heappop(self._heap)
            self.remove(request)
            taken.append(request)
            rows -= request.rows
            if rows <= 0:
                break
        return taken


#: A lane's place among those of its constraint.
_Head: TypeAlias = tuple[tuple[float, int], int, Lane]


class RequestQueue:
    """The waiting requests of one deployment version, in lanes.

    Parameters
    ----------
    priority_age
        Seconds of waiting that one unit of priority is worth.

    Notes
    -----
    Every operation costs at most the logarithm of what waits, also where each
    request has a lane of its own.

    Examples
    --------
    >>> queue = RequestQueue(priority_age=1.0)
    >>> for key, priority in [("low", 0), ("high", 5)]:
    ...     queue.push(Request(key, "m", None, 0.0, priority=priority, lane="l"))
    >>> [lane.head().key for lane in queue.oldest(10)]
    ['high']
    """

    __slots__ = ("_heads", "_lanes", "_sequence", "count", "priority_age", "rows")

    def __init__(self, priority_age: float) -> None:
        self.priority_age = priority_age
        self.count = 0
        self.rows = 0
        self._lanes: dict[Hashable, Lane] = {}
        # By constraint: order of the head, push number, lane. Entries of the past
        # are skipped.
        self._heads: dict[Hashable, list[_Head]] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<RequestQueue waiting: {self.count} lanes: {len(self._lanes)}>"

    def push(self, request: Request) -> None:
        """Let a request wait in its lane.

        A request that comes back keeps the place of its first arrival.
        """
        assert request.lane is not None and not request.waiting
        self._sequence += 1
        if request.order is None:
            virtual = request.arrived - request.priority * self.priority_age
            request.order = (virtual, self._sequence)
        lane = self._lanes.get(request.lane)
        if lane is None:
            lane = self._lanes[request.lane] = Lane(request.lane)
        lane.push(request)
        request.queue = self
        self.count += 1
        self.rows += request.rows
        if lane.head() is request:
            self._note_head(lane)

    def take(self, lane: Lane, rows: int) -> list[Request]:
        """Remove requests from the front of a lane, as :meth:`Lane.take`."""
        taken = lane.take(rows)
        self.count -= len(taken)
        self.rows -= sum(request.rows for request in taken)
        self._settle(lane)
        return taken

    def discard(self, request: Request) -> None:
        """Let go of a request, if it waits here."""
        if request.waiting:
            assert request.lane is not None
            lane = self._lanes[request.lane]
            was_head = lane.head() is request
            lane.remove(request)
            self.count -= 1
            self.rows -= request.rows
            if was_head or not lane.count:
                self._settle(lane)

    def oldest(self, count: int) -> list[Lane]:
        """The lanes with the oldest heads, oldest first.

        At most ``count`` for each constraint: however many wait for what nobody can
        give, they hide nobody else.
        """
        found = [
            entry
            for constraint in list(self._heads)
            for entry in self._oldest_under(constraint, count)
        ]
        found.sort()
        return [lane for _, _, lane in found]

    def _oldest_under(self, constraint: Hashable, count: int) -> list[_Head]:
        heads = self._heads[constraint]
        found: list[_Head] = []
        lanes: set[Lane] = set()
        while heads and len(found) < count:
            entry = heapq.heappop(heads)
            order, _, lane = entry
            head = lane.head()
            if head is not None and head.order == order and lane not in lanes:
                found.append(entry)
                lanes.add(lane)
        for entry in found:
            heapq.heappush(heads, entry)
        if not heads:
            del self._heads[constraint]
        return found

    def requests(self) -> list[Request]:
        """Everybody who waits, in no particular order."""
        return [r for lane in self._lanes.values() for r in lane.requests()]

    def _settle(self, lane: Lane) -> None:
        if lane.count:
            self._note_head(lane)
        else:
            self._lanes.pop(lane.key, None)

    def _note_head(self, lane: Lane) -> None:
        head = lane.head()
        assert head is not None and head.order is not None
        self._sequence += 1
        heads = self._heads.setdefault(head.constraint, [])
        heapq.heappush(heads, (head.order, self._sequence, lane))
