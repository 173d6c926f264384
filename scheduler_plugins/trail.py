"""What has happened to a request, kept in few bytes. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

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
_REMEMBERED = 2_000

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
    waits: list[tuple[float, str]] | None = None

    def waits_for(self, now: float, what: str) -> None:
        """The worker says what it waits for; or, with nothing, that it has begun."""
        self.waits = [*(self.waits or ()), (now, what)]

    def answered(self, now: float, message: DoneMessage) -> None:
        """The worker has said how it went."""
        self.ended, self.device = now, message["device"]
        self.waited, self.ran = message["waited"], message["ran"]
        self.passes = len(message["passes"])


class Trail(list[object]):
    """The events of one request.

    A flat list of their parts, so that the garbage collector has one thing to look at
    for each request; :meth:`events` gives them one by one.

    Examples
    --------
    >>> trail = Trail()
    >>> trail.note(0.0, QUEUED, "1")
    >>> trail.note(0.5, QUEUED, "1")  # it was only put elsewhere in the queue
    >>> trail.note(1.0, CANCELLED, "released")
    >>> trail.events()
    [(0.0, 'queued', '1'), (1.0, 'cancelled', 'released')]
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Trail {' → '.join(what for _, what, _ in self.events())}>"

    def note(self, now: float, what: str, about: str | Attempt = "") -> None:
        """Add an event, unless it says what the last one has said."""
        if self and self[-2] == what and self[-1] == about:
            return
        if len(self) == 3 * _LONGEST:
            # How it began and what came last tell most.
            middle = 3 * (_LONGEST // 2)
            del self[middle : middle + 3]
        self += (now, what, about)

    def interrupt(self, now: float, told: str) -> None:
        """Add why an attempt has ended; it may stand in the queue again by then.

        >>> trail = Trail()
        >>> trail.note(1.0, QUEUED, "1")
        >>> trail.interrupt(1.1, "its process ended")
        >>> trail.events()
        [(1.0, 'interrupted', 'its process ended'), (1.0, 'queued', '1')]
        """
        again = self.events()[-1:]
        if not again or again[0][1] != QUEUED:
            self.note(now, INTERRUPTED, told)
            return
        del self[-3:]
        self.note(again[0][0], INTERRUPTED, told)
        self.note(*again[0])

    def events(self) -> list[Event]:
        """What has happened, in order."""
        parts: list[Any] = self
        return list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))

    @property
    def is_cut(self) -> bool:
        """Whether some events may be left out in the middle."""
        return len(self) == 3 * _LONGEST

    def attempts(self) -> list[Attempt]:
        """The batches that it was sent in."""
        return [about for _, _, about in self.events() if isinstance(about, Attempt)]


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
        # Keys, names and trails in turn: flat, as they are.
        self._parts: deque[Any] = deque(maxlen=3 * maxlen)

    def __repr__(self) -> str:
        return f"<Past requests: {len(self._parts) // 3}>"

    def add(self, key: Hashable, name: str, trail: Trail) -> None:
        """Remember a request to a deployment."""
        self._parts += (key, name, trail)

    def find(self, key: Hashable) -> tuple[str, Trail] | None:
        """The deployment and the trail of the latest request of a key."""
        latest = iter(reversed(self._parts))
        for trail, name, known in zip(latest, latest, latest, strict=True):
            if known == key:
                return name, trail
        return None
