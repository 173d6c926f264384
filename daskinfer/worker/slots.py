"""Which requests join the batch that steps, when, and how many there may be.

Pure: no clock, no device; the time is an argument.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from dask.typing import Key

from daskinfer.timing import Ceilings, LatencyModel
from daskinfer.wording import counted

#: Rows that step together before anything is measured.
FIRST_ROWS = 8
#: Sizes within this share of the best rate are as good; the smallest steps fastest.
AS_GOOD = 0.95
#: Steps after which more rows than seem best are measured anew, in case that was in a
#: bad moment; twice as many each time that they are no better.
FIRST_RETRY = 500
LAST_RETRY = 16_000
#: States are kept of so many times the rows that may step together: some requests are
#: not read from, and sit out.
HELD_FACTOR = 4
#: Seconds that no more is held than there was memory for.
SHORTAGE_SECONDS = 30.0
#: Kinds of inputs whose starts are timed.
_KINDS = 256

# One device, and one class of it: the worker's own.
_HERE = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may take part in a pass.

    Attributes
    ----------
    kind
        Equal for requests that may share it; None: it shares with none.
    """

    key: Key
    rows: int
    kind: Hashable


class Slots:
    """Decides who starts and who steps.

    How many rows step together follows from what steps of each size have taken: the
    smallest number within 5 % of the best rate, and beyond the largest that was
    measured as long as that was the best. Starts come between steps: while others
    are under way, as many as take no longer than one step, and one at least.

    Parameters
    ----------
    max_rows
        The most rows of a pass.
    allowed
        Ascending sizes that passes are padded to; None: there is no padding.
    room
        Rows that the model has room for; None: as many as memory has.
    target
        Seconds that a step should not exceed; None: no matter.

    Examples
    --------
    >>> slots = Slots(max_rows=4)
    >>> for rows in (1, 1, 2, 2, 4, 4):
    ...     slots.stepped(rows, seconds=0.010 + 0.001 * rows, now=0.0)
    >>> slots.limit
    4
    >>> waiting = [Candidate(key, 1, "text") for key in range(9)]
    >>> [candidate.key for candidate in slots.starting(waiting, 1, 1, 0.0, now=0.0)]
    [0]
    """

    def __init__(
        self,
        max_rows: int,
        allowed: tuple[int, ...] | None = None,
        room: int | None = None,
        target: float | None = None,
    ) -> None:
        self.max_rows = max_rows if room is None else min(max_rows, room)
        self.room = HELD_FACTOR * self.max_rows if room is None else room
        self._allowed = allowed
        self._target = target
        self._steps = self._unmeasured()
        self._ceilings = Ceilings(self.padded(self.max_rows) or self.max_rows, allowed)
        self._starts: OrderedDict[Hashable, LatencyModel] = OrderedDict()
        self._shortage = (0, 0.0)
        self._last_step = 0.0
        self._limit: tuple[int, int] = (-1, 0)
        self._retry = FIRST_RETRY
        self._since_try = 0
        self._tried = 0

    def __repr__(self) -> str:
        return f"<Slots {self.limit} of at most {self.max_rows}>"

    # Learning

    def stepped(self, rows: int, seconds: float, now: float) -> None:
        """Learn from one step of so many rows, padding not counted."""
        self._last_step = seconds
        self._steps.observe(_HERE, _HERE, rows, seconds)
        if self._ceilings.fitted(_HERE, self.padded(rows) or rows, now):
            self._limit = (-1, 0)
        self._since_try += 1
        if self._since_try >= self._retry:
            self._try_again()

    def started(self, kind: Hashable, rows: int, seconds: float) -> None:
        """Learn from one pass of starts."""
        self._timed(kind).observe(_HERE, _HERE, rows, seconds)

    def step_did_not_fit(self, rows: int, now: float) -> None:
        """Learn that a step of so many rows found no memory: passes get smaller."""
        self._ceilings.out_of_memory(_HERE, self.padded(rows) or rows, now)
        self._limit = (-1, 0)

    def start_did_not_fit(self, held: int, now: float) -> None:
        """Learn that there was no memory for more than is held already."""
        self._shortage = (max(held, 1), now + SHORTAGE_SECONDS)

    # Deciding

    @property
    def ceiling(self) -> int:
        """The most rows that fit into one pass."""
        return min(self._ceilings.of(_HERE), self.max_rows)

    @property
    def limit(self) -> int:
        """How many rows shall step together, if there are as many."""
        version, limit = self._limit
        if version != self._steps.version:
            limit = min(self._sized(), self.ceiling)
            self._limit = (self._steps.version, limit)
        return limit

    @property
    def seconds(self) -> float:
        """How long a step takes when as many rows step as shall."""
        return self._steps.seconds(_HERE, _HERE, self.limit)

    def padded(self, rows: int) -> int | None:
        """The size to pad a pass to; None where nothing is to be padded."""
        if not self._allowed:
            return None
        place = bisect_left(self._allowed, rows)
        return self._allowed[min(place, len(self._allowed) - 1)]

    def refusal(self, rows: int) -> str | None:
        """Why a request of so many rows can never run; None if it can."""
        if rows <= self.max_rows:
            return None
        return (
            f"a request of {counted(rows, 'row')} cannot advance step by step: no more "
            f"than {self.max_rows} rows do so together (max_batch_size, and the "
            "model's slots); send it in parts"
        )

    def starting(
        self,
        waiting: Sequence[Candidate],
        running: int,
        held: int,
        spent: float,
        now: float,
    ) -> list[Candidate]:
        """Who starts in the next pass, before the next step; empty if nobody does.

        The one that has waited longest is among them: nobody is overtaken for ever.

        Parameters
        ----------
        waiting
            In the order in which they shall start.
        running
            Rows that take part in the next step so far.
        held
            Rows whose states are kept, those included.
        spent
            Seconds that starts have taken since the last step.
        now
            The time, in seconds.
        """
        if not waiting:
            return []
        first = waiting[0]
        # However small the limit is: what is alone is in nobody's way.
        room = self.limit - running if running else max(self.limit, first.rows)
        room = min(room, self._held(now) - held) if held else room
        if first.rows > room:
            return []
        within = min(room, self.ceiling)
        if running:
            in_time = self._rows_within(first, self._last_step - spent)
            if first.rows > in_time and spent:
                return []
            within = min(within, in_time)
        chosen, rows = [first], first.rows
        for candidate in waiting[1:] if first.kind is not None else ():
            if candidate.kind != first.kind:
                continue
            rows += candidate.rows
            if rows > within:
                break
            chosen.append(candidate)
        return chosen

    def is_full(self, rows: int, held: int, now: float) -> bool:
        """Whether so many more rows cannot be held before others have left."""
        return bool(held) and rows > self._held(now) - held

    def passes(self, live: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """Divide who takes part in a step into passes; each one is in exactly one."""
        kinds: dict[Hashable, list[Candidate]] = {}
        for candidate in live:
            alone = candidate.kind is None
            kind = (alone, candidate.key if alone else candidate.kind)
            kinds.setdefault(kind, []).append(candidate)
        for members in kinds.values():
            part: list[Candidate] = []
            rows = 0
            for member in members:
                if part and rows + member.rows > self.ceiling:
                    yield part
                    part, rows = [], 0
                part.append(member)
                rows += member.rows
            yield part

    # Inside

    def _try_again(self) -> None:
        """Forget what more rows take than seem best, so that they are tried anew."""
        best = self.limit
        is_better = best > self._tried
        self._retry = FIRST_RETRY if is_better else min(2 * self._retry, LAST_RETRY)
        self._tried, self._since_try = best, 0
        table = self._steps.table(_HERE)
        known = [(rows, seconds) for rows, seconds, _ in table if rows <= best]
        if len(known) < len(table):
            self._steps = self._unmeasured()
            self._steps.seed(_HERE, _HERE, known)
            self._limit = (-1, 0)

    def _sized(self) -> int:
        highest = self._ceilings.of(_HERE)
        sizes = [size for size in self._steps.sizes(_HERE) if size <= highest]
        if not sizes:
            return min(FIRST_ROWS, self.ceiling)
        top = sizes[-1]
        seconds = {size: self._steps.seconds(_HERE, _HERE, size) for size in sizes}
        if self._target is not None:
            sizes = [n for n in sizes if seconds[n] <= self._target] or sizes[:1]
        best = max(size / seconds[size] for size in sizes)
        good = [n for n in sizes if n / seconds[n] >= AS_GOOD * best]
        if good[-1] != sizes[-1] or sizes[-1] != top:
            return good[0]
        # The largest is still among the best: a larger one may be better.
        above = 2 * sizes[-1]
        if self._allowed:
            place = bisect_right(self._allowed, sizes[-1])
            above = self._allowed[min(place, len(self._allowed) - 1)]
        above = min(above, highest)
        if above > sizes[-1] and self._steps.measurements(_HERE, above) == 0:
            return above
        return good[0]

    def _unmeasured(self) -> LatencyModel:
        return LatencyModel(self.padded(self.max_rows) or self.max_rows, self._allowed)

    def _held(self, now: float) -> int:
        rows, until = self._shortage
        return min(self.room, rows) if now < until else self.room

    def _rows_within(self, first: Candidate, seconds: float) -> int:
        """How many rows may start in so many seconds, no more than can be foreseen."""
        timed = self._timed(first.kind)
        top = timed.top(_HERE)
        if not top:
            return first.rows if seconds > 0 else 0
        least, most = 0, min(2 * top, self.max_rows)
        while least < most:
            rows = (least + most + 1) // 2
            if timed.seconds(_HERE, _HERE, rows) <= seconds:
                least = rows
            else:
                most = rows - 1
        return least

    def _timed(self, kind: Hashable) -> LatencyModel:
        known = self._starts.get(kind)
        if known is None:
            known = self._starts[kind] = self._unmeasured()
            if len(self._starts) > _KINDS:
                self._starts.popitem(last=False)
        self._starts.move_to_end(kind)
        return known
