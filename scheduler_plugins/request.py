"""One request, as the scheduler knows it. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from dask.typing import Key

from scheduler_plugins.routing import Edition
from scheduler_plugins.statistics import Figures, Statistics
from scheduler_plugins.trail import BEGUN_AGAIN, Trail

if TYPE_CHECKING:
    from daskinfer.protocol import StreamOrder
    from scheduler_plugins.queueing import RequestQueue

#: A request's place in a lane's heap, abandoned once the request names another.
Entry: TypeAlias = "tuple[tuple[float, int], int, Request]"


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
    cause
        Why it is about to fail, in the words of :mod:`~scheduler_plugins.outcomes`.
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
    content
        The hash of what it says, where its client has told.
    was_cached
        Whether its answer was found, or computed for another request that is equal.
    trail
        What has happened to it.
    stream, delivered
        How its client reads it piece by piece; None: it does not. So many chunks were
        sent on to it.
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
    cause: str = ""
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
    content: bytes | None = field(default=None, repr=False)
    was_cached: bool = False
    trail: Trail = field(default_factory=Trail, repr=False)
    stream: StreamOrder | None = field(default=None, repr=False)
    delivered: int = 0
    _entry: Entry | None = field(default=None, repr=False)

    @property
    def waiting(self) -> bool:
        """Whether it stands in the queue."""
        return self._entry is not None

    @property
    def replays(self) -> bool:
        """Whether another attempt may go on where one has ended."""
        return self.stream is not None and self.stream["replay"]

    def arrived_at(self, counts: Statistics | None) -> None:
        """Be counted by a deployment; None: there is none of the name."""
        self.counts = counts
        if counts is not None:
            counts.arrived()

    def renew(self, now: float) -> None:
        """Begin anew, as another request: the result was lost, or the user retries."""
        if self.counts is not None:
            self.counts.arrived()
        self.trail.note(now, BEGUN_AGAIN)
        self.ended, self.order, self.arrived = False, None, now
        self.attempts, self.misses, self.was_cached, self.cause = 0, 0, False, ""
        self.charges = self.solo = self.bystander = 0
        self.group, self.tried, self.hedged = None, frozenset(), False
        self.delivered = 0
        if self.stream is not None:
            # Its reader has seen it end. Who wants the whole wants the same as before.
            self.stream = {**self.stream, "read": False}
