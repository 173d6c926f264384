"""Which results are due, and how many more requests may be sent.

Pure: no clock, no event loop, no Dask.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """How much there may be at a time.

    Attributes
    ----------
    in_flight
        Requests without an answer.
    kept
        Requests whose result has not been taken, with an answer or without.
    """

    in_flight: int
    kept: int


#: Before anything is known.
NONE = Bounds(0, 0)


class Outcome(NamedTuple):
    """What became of one input: a value, or an error.

    Attributes
    ----------
    place
        The input's number among all, from 0.
    """

    place: int
    value: Any = None
    error: BaseException | None = None


class Unreadable:
    """Stands for an input that could not be read, which becomes of it then.

    Parameters
    ----------
    error
        Why.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"<Unreadable {self.error!r}>"


class Window:
    """The part of an endless list of requests that exists at this moment.

    Parameters
    ----------
    ordered
        Whether results are due in the order of the inputs, or as they come.

    Attributes
    ----------
    bounds
        May change at any time; what is there already stays.
    sent, taken
        How many inputs were sent, and how many results were taken.
    unanswered
        How many requests are on their way.

    Examples
    --------
    >>> window = Window(ordered=True)
    >>> window.bounds = Bounds(in_flight=2, kept=2)
    >>> window.send(), window.send(), window.room
    (0, 1, 0)
    >>> window.answered(Outcome(1, "b"))
    >>> window.take() is None
    True
    >>> window.answered(Outcome(0, "a"))
    >>> window.take().value, window.take().value, window.room
    ('a', 'b', 2)
    """

    def __init__(self, ordered: bool) -> None:
        self.bounds = NONE
        self.sent = 0
        self.taken = 0
        self.unanswered = 0
        self._ordered = ordered
        self._ready: OrderedDict[int, Outcome] = OrderedDict()
        self._refused: deque[int] = deque()
        self._has_ended = False
        self._has_failed = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return (
            f"<Window sent: {self.sent} unanswered: {self.unanswered} "
            f"taken: {self.taken} of {self.bounds}>"
        )

    # Sending

    @property
    def room(self) -> int:
        """How many more inputs may be sent now."""
        if self._has_ended or self._refused:
            return 0
        in_flight, kept = self.bounds
        room = min(in_flight - self.unanswered, kept - self.sent + self.taken)
        return max(room, 0)

    @property
    def is_low(self) -> bool:
        """Whether there is so much room that filling it is worth a change of threads.

        Once all results are taken there is.
        """
        return self.room >= max(min(self.bounds) // 4, 1)

    def send(self) -> int:
        """Note that an input is sent, and number it."""
        self.unanswered += 1
        self.sent += 1
        return self.sent - 1

    def again(self, count: int) -> list[int]:
        """Take up to so many of those that were refused, to be sent again."""
        refused = self._refused
        places = [refused.popleft() for _ in range(min(count, len(refused)))]
        self.unanswered += len(places)
        return places

    @property
    def has_refused(self) -> bool:
        """Whether some have to be sent again."""
        return bool(self._refused)

    # What becomes of them

    def answered(self, outcome: Outcome) -> None:
        """Note what became of one that was sent."""
        self.unanswered -= 1
        self._ready[outcome.place] = outcome

    def refused(self, place: int) -> None:
        """Note that one was turned away, which is no outcome: it is sent again."""
        self.unanswered -= 1
        self._refused.append(place)

    def end(self, error: BaseException | None = None) -> None:
        """There are no more inputs, because of an error or not.

        The results of those that were sent are due all the same.
        """
        self._has_ended = True
        self._error = self._error or error

    def fail(self, error: BaseException) -> None:
        """Nothing will be answered any more; what is due and here is taken first."""
        if not self._has_failed:
            self._has_ended = self._has_failed = True
            self._error = error

    def take(self) -> Outcome | None:
        """Take the result that is due next; None if it is not here."""
        if not self._ordered:
            due = self._ready.popitem(last=False)[1] if self._ready else None
        else:
            due = self._ready.pop(self.taken, None)
        if due is not None:
            self.taken += 1
        return due

    @property
    def is_over(self) -> bool:
        """Whether no more results will come, once :meth:`take` has given None."""
        return self._has_ended and (self._has_failed or self.taken == self.sent)

    @property
    def error(self) -> BaseException | None:
        """What to raise then."""
        return self._error
