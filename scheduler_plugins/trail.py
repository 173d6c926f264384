"""What has happened to a request, kept in few bytes. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from daskinfer.protocol import DoneMessage

#: What can happen; the words are those of a :class:`daskinfer.Story`.
SUBMITTED = "submitted"
QUEUED = "queued"
HELD_BACK = "held back"
SENT = "sent"
INTERRUPTED = "interrupted"
BEGUN_AGAIN = "begun again"
ANSWERED = "answered"
FAILED = "failed"
CANCELLED = "cancelled"

#: Events of one request that are kept.
_LONGEST = 64
#: Requests that are remembered when their tasks are gone.
_REMEMBERED = 10_000

#: When it was, in monotonic seconds; what it was; and more about it.
Event: TypeAlias = "tuple[float, str, str | Attempt]"


@dataclass(slots=True, eq=False)
class Attempt:
    """A batch as far as its requests' stories go; all of them share it.

    It was ``waited`` for on the worker, and ``ran`` there, for so many seconds, in
    ``passes`` passes; it ``ended`` when the worker's answer came. ``waits`` are what
    the worker has said that it waits for, and when.
    """

    batch_id: str
    version: str
    worker: str
    rows: int
    requests: int
    sent_at: float
    ended: float | None = None
    waited: float = 0.0
    ran: float = 0.0
    passes: int = 0
    device: str = ""
    waits: list[tuple[float, str]] = field(default_factory=list)

    def waits_for(self, now: float, what: str) -> None:
        """The worker says what it waits for; or, with nothing, that it has begun."""
        self.waits.append((now, what))

    def answered(self, now: float, message: DoneMessage) -> None:
        """The worker has said how it went."""
        self.ended, self.device = now, message["device"]
        self.waited, self.ran = message["waited"], message["ran"]
        self.passes = len(message["passes"])


class Trail:
    """The events of one request.

    Examples
    --------
    >>> trail = Trail()
    >>> trail.note(0.0, QUEUED, "1")
    >>> trail.note(0.5, QUEUED, "1")  # it was only put elsewhere in the queue
    >>> trail.note(1.0, CANCELLED, "released")
    >>> list(trail)
    [(0.0, 'queued', '1'), (1.0, 'cancelled', 'released')]
    """

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[Event] = []

    def __repr__(self) -> str:
        return f"<Trail {' → '.join(what for _, what, _ in self._events)}>"

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def note(self, now: float, what: str, about: str | Attempt = "") -> None:
        """Add an event, unless it says what the last one has said."""
        events = self._events
        if events and events[-1][1] == what and events[-1][2] == about:
            return
        if len(events) == _LONGEST:
            # How it began and what came last tell most.
            del events[_LONGEST // 2]
        events.append((now, what, about))

    def interrupt(self, now: float, told: str) -> None:
        """Add why an attempt has ended; it may stand in the queue again by then.

        >>> trail = Trail()
        >>> trail.note(1.0, QUEUED, "1")
        >>> trail.interrupt(1.1, "its process ended")
        >>> list(trail)
        [(1.0, 'interrupted', 'its process ended'), (1.0, 'queued', '1')]
        """
        events = self._events
        again = events.pop() if events and events[-1][1] == QUEUED else None
        self.note(now if again is None else again[0], INTERRUPTED, told)
        if again is not None:
            self.note(*again)

    @property
    def is_cut(self) -> bool:
        """Whether some events may be left out in the middle."""
        return len(self._events) == _LONGEST

    def attempts(self) -> list[Attempt]:
        """The batches that it was sent in."""
        return [about for _, _, about in self if isinstance(about, Attempt)]


class Past:
    """Trails of requests whose tasks are gone; the oldest are forgotten first.

    Examples
    --------
    >>> past = Past(maxlen=2)
    >>> for key in "abc":
    ...     past.add(key, "m", Trail())
    >>> past.find("a"), past.find("c")
    (None, ('m', <Trail >))
    """

    def __init__(self, maxlen: int = _REMEMBERED) -> None:
        self._requests: deque[tuple[Hashable, str, Trail]] = deque(maxlen=maxlen)

    def __repr__(self) -> str:
        return f"<Past requests: {len(self._requests)}>"

    def add(self, key: Hashable, name: str, trail: Trail) -> None:
        """Remember a request to a deployment."""
        self._requests.append((key, name, trail))

    def find(self, key: Hashable) -> tuple[str, Trail] | None:
        """The deployment and the trail of the latest request of a key."""
        for known, name, trail in reversed(self._requests):
            if known == key:
                return name, trail
        return None
