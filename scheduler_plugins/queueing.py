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
from dataclasses import dataclass, field
from typing import TypeAlias

from dask.typing import Key

from scheduler_plugins.routing import Edition
from scheduler_plugins.statistics import Figures, Statistics


@dataclass(slots=True, eq=False)
class Request:
    """One request the scheduler knows of.

    Attributes
    ----------
    key
        The Dask task.
    name, pinned
        The deployment asked for, and the version if one was named.
    rows
        What it adds to a batch, at least 1; 1 where its inputs are futures.
    signature
        What its inputs look like; None where they are futures.
    client, inline
        Who takes a result of up to ``inline`` bytes with the word that it exists.
    constraint, lane
        Where the user allows it to run; and who it may share a pass with, decided when
        it begins to wait.
    arrived
        When the scheduler first saw it, monotonic seconds.
    priority
        Higher overtakes.
    order
        The place in its lane, once it has one.
    attempts
        How often it was sent to a worker since it arrived.
    misses
        How often of these its inputs were not where they should be.
    batch
        The batch it was sent with, while it is running.
    dispatched
        When that was sent.
    queue
        The queue it waits in, or waited in last.
    ended
        Whether it was answered, or has failed.
    forgotten
        Whether its task is gone. Its key may be that of another by now.
    error
        Why it cannot be served, found out before it could wait.
    counts
        Of the deployment that it arrived at. Another may have its name by now.
    charges, solo
        Attempts that a failure of the engine has ended while the request was
        running; and those of them in which it was alone in its batch.
    bystander
        How often a worker was lost while the request was queued there.
    group
        Those with whom it runs isolated, once a worker has died under them.
    tried
        Workers on which it has failed, to be avoided.
    hedged
        Whether it was given to another device as one that runs it did not answer.
    delayed
        Whether it is held back until its next attempt.
    timeout
        Seconds from its arrival within which it is to be answered; None: any time.
    edition, point, is_bound
        What was active when it was sent, and where it stands among those of whom a
        canary gets a share; as a step of a pipeline it is bound to both.
    figures
        Of the version that it was last sent to.
    """

    key: Key
    name: str
    pinned: str | None
    arrived: float
    priority: float = 0.0
    rows: int = 1
    signature: Hashable = None
    client: str | None = None
    inline: int = 0
    constraint: Hashable = None
    has_dependencies: bool = False
    lane: Hashable | None = None
    order: tuple[float, int] | None = None
    attempts: int = 0
    misses: int = 0
    batch: str | None = None
    dispatched: float = 0.0
    queue: RequestQueue | None = None
    ended: bool = False
    forgotten: bool = False
    error: Exception | None = None
    counts: Statistics | None = field(default=None, repr=False)
    charges: int = 0
    solo: int = 0
    bystander: int = 0
    group: Hashable | None = None
    tried: frozenset[str] = frozenset()
    hedged: bool = False
    delayed: bool = False
    timeout: float | None = None
    edition: Edition | None = field(default=None, repr=False)
    point: float | None = None
    is_bound: bool = False
    figures: Figures | None = field(default=None, repr=False)
    _entry: _Entry | None = field(default=None, repr=False)

    @property
    def waiting(self) -> bool:
        """Whether it stands in the queue."""
        return self._entry is not None

    def arrived_at(self, counts: Statistics | None) -> None:
        """Be counted by a deployment; None: there is none of the name."""
        self.counts = counts
        if counts is not None:
            counts.arrived()

    def renew(self, now: float) -> None:
        """Begin anew, as another request: the result was lost, or the user retries."""
        if self.counts is not None:
            self.counts.arrived()
        self.ended, self.order, self.arrived = False, None, now
        self.attempts = self.misses = 0
        self.charges = self.solo = self.bystander = 0
        self.group, self.tried, self.hedged = None, frozenset(), False


#: A request's place in a lane's heap, abandoned once the request names another.
_Entry: TypeAlias = tuple[tuple[float, int], int, Request]


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
        self._heap: list[_Entry] = []

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
