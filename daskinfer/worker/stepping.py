"""Continuous batching: a batch that requests join and leave at every step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer.stepping import tells
from daskinfer.worker.execution import Item
from daskinfer.worker.isolation import Isolation
from daskinfer.worker.producing import AtWork, Emission
from daskinfer.worker.slots import Candidate, Slots
from daskinfer.worker.step_passes import Member, StepPasses

if TYPE_CHECKING:
    from daskinfer.worker.device_steps import DeviceSteps
    from daskinfer.worker.execution import Call, Memory


_numbers = itertools.count()


class StepProducer:
    """All requests of one model that advances step by step.

    A :class:`~daskinfer.worker.producing.Producer` that is joined while it runs.
    Between steps, requests that wait are started as
    :class:`~daskinfer.worker.slots.Slots` decides. A pass that raises, or does not fit
    the device's memory, is run again in halves, so that a request the model fails on
    fails alone.

    Parameters
    ----------
    steps
        The model.
    slots
        Decides how many rows step together.
    batch_dim
        The axis along which requests are joined; None stacks samples.
    device
        Tells errors of the device from those of the inputs; None: there are none.
    clock
        Seconds, to time passes with.

    Attributes
    ----------
    slots
        What has been learned of its steps.
    passes
        Has the states.
    at_work
        Who is in the pass that is under way.
    on_room
        Called when one that ran alone has left its place; None: nobody asks.

    Examples
    --------
    >>> import numpy as np
    >>> from daskinfer.device import open_device
    >>> from daskinfer.worker.device_steps import DeviceSteps
    >>> from daskinfer.worker.execution import Item
    >>> class Countdown:
    ...     def start(self, x):
    ...         return x
    ...
    ...     def step(self, left):
    ...         return left, left == 0, left - 1
    >>> steps = DeviceSteps(Countdown(), open_device("cpu"))
    >>> producer = StepProducer(steps, Slots(max_rows=8))
    >>> producer.add([Item("a", lambda: ((np.array([2]),), {}))])
    >>> [(e.key, e.chunks, e.ended) for e in producer.advance(0.0)]
    [('a', [array([2])], False)]
    >>> producer.add([Item("b", lambda: ((np.array([1]),), {}))])
    >>> [(e.key, e.chunks, e.ended) for e in producer.advance(0.0)]
    [('a', [array([1])], False), ('b', [array([1])], False)]
    >>> [(e.key, e.chunks, e.ended) for e in producer.advance(0.0)]
    [('a', [array([0])], True), ('b', [array([0])], True)]
    """

    joins = True

    def __init__(
        self,
        steps: DeviceSteps,
        slots: Slots,
        batch_dim: int | None = 0,
        device: Memory | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.slots = slots
        self.passes = StepPasses(steps, slots, batch_dim, clock)
        self._clock = clock
        self._isolation = Isolation(device, self._does_not_fit, self._end)
        self._waiting: deque[Member] = deque()
        self._running: dict[Key, Member] = {}
        self._told: dict[Key, Emission] = {}
        self._is_news = False
        self._rows_alone = 0
        self._is_stuck = False
        self.on_room: Callable[[], object] | None = None
        self.at_work: AtWork | None = None

    def __repr__(self) -> str:
        return (
            f"<StepProducer running: {len(self._running)} waiting: "
            f"{len(self._waiting)} {self.slots!r}>"
        )

    @property
    def broken(self) -> BaseException | None:
        """Why nothing runs on the device any more; what is live has not ended."""
        return self._isolation.broken

    @property
    def live(self) -> list[Key]:
        """The requests whose end has not been emitted."""
        waiting = (member.key for member in self._waiting)
        return list(dict.fromkeys((*self._running, *waiting, *self._told)))

    @property
    def waits(self) -> bool:
        """Whether no turn is of any use before one that runs alone has ended."""
        return self._is_stuck and self._rows_alone > 0

    def alone(self, call: Call) -> Generator[Any]:
        """Run one request to its end, none of whose steps is shared.

        For a model that calls this one, on the device's thread. What it gives may be
        read while that model takes many turns: its rows are held like those of others.

        Raises
        ------
        InferenceError
            Others have all the slots, and end no sooner than the caller.
        Exception
            What the model raises.
        """
        member = self.passes.member(Item(f"alone-{next(_numbers)}", lambda: call))
        self.passes.refuse_without_slots(member)
        ends = not member.rows
        self._rows_alone += member.rows
        try:
            if not ends:
                self.passes.start([member])
            while not ends:
                ((chunk, ends),) = self.passes.step([member])
                if tells(chunk):
                    yield chunk
        finally:
            self.passes.release(member)
            self._rows_alone -= member.rows
            self._is_stuck = False
            if (wake := self.on_room) is not None:
                wake()

    # Coming and going

    def add(self, items: list[Item]) -> None:
        """Let requests wait for their start."""
        for item in items:
            try:
                member = self.passes.member(item)
            except Exception as error:
                self._emit(item.key, ended=True, error=error)
                continue
            if member.rows:
                self._waiting.append(member)
            else:
                # Nothing will ever come of it.
                self._emit(item.key, ended=True)

    def drop(self, keys: Collection[Key]) -> None:
        """Take requests out; the next step is without them."""
        wanted = set(self.live).difference(keys)
        self._waiting = deque(m for m in self._waiting if m.key in wanted)
        for key in [key for key in self._running if key not in wanted]:
            self.passes.release(self._running.pop(key))
        for key in keys:
            self._told.pop(key, None)

    def close(self) -> None:
        """Let go of everything."""
        self.drop(self.live)

    def _end(self, member: Member, error: BaseException | None = None) -> None:
        self._running.pop(member.key, None)
        self.passes.release(member)
        self._emit(member.key, ended=True, error=error)

    def _emit(
        self,
        key: Key,
        chunks: Sequence[Any] = (),
        *,
        ended: bool = False,
        error: BaseException | None = None,
    ) -> None:
        emission = self._told.setdefault(key, Emission(key))
        emission.chunks += chunks
        emission.ended, emission.error = ended, error

    # Steps

    def advance(self, budget: float, paused: Collection[Key] = ()) -> list[Emission]:
        """Run steps; see :meth:`daskinfer.worker.producing.Producer.advance`.

        Returns before the ``budget`` is spent when a request has been told its first
        chunk. One that is ``paused`` sits out, unless another waits for its place.
        """
        stop = self._clock() + budget
        self._is_news = False
        while self._turn(paused) and not self._is_news and self._clock() < stop:
            pass
        self.at_work = None
        told, self._told = self._told, {}
        return list(told.values())

    def _turn(self, paused: Collection[Key]) -> bool:
        """Start who may, and let all others step once; whether there was anybody."""
        self._start_some(paused)
        if self._waiting and self.slots.is_full(
            self._waiting[0].rows, self._held, self._clock()
        ):
            paused = ()
        stepping = [m for m in self._running.values() if m.key not in paused]
        self._is_stuck = bool(self._waiting) and not stepping
        for members in self._passes(stepping):
            self._isolation.attempt(members, self._step)
        return bool(stepping) and self.broken is None

    @property
    def _held(self) -> int:
        running = sum(member.rows for member in self._running.values())
        return running + self._rows_alone

    def _start_some(self, paused: Collection[Key]) -> None:
        spent = 0.0
        while self._waiting and self.broken is None:
            running = (m for m in self._running.values() if m.key not in paused)
            chosen = self.slots.starting(
                [Candidate(m.key, m.rows, m.signature) for m in self._waiting],
                sum(member.rows for member in running),
                self._held,
                spent,
                self._clock(),
            )
            if not chosen:
                return
            keys = {candidate.key for candidate in chosen}
            members = [m for m in self._waiting if m.key in keys]
            self._waiting = deque(m for m in self._waiting if m.key not in keys)
            began = self._clock()
            self._isolation.attempt(members, self._start)
            spent += self._clock() - began

    def _passes(self, members: Sequence[Member]) -> list[list[Member]]:
        candidates = [Candidate(m.key, m.rows, self.passes.family(m)) for m in members]
        return [
            [self._running[candidate.key] for candidate in part]
            for part in self.slots.passes(candidates)
        ]

    def _start(self, members: Sequence[Member]) -> None:
        self.at_work = AtWork([m.key for m in members], perf_counter())
        self.passes.start(members)
        self._running |= {member.key: member for member in members}

    def _step(self, members: Sequence[Member]) -> None:
        self.at_work = AtWork([m.key for m in members], perf_counter())
        # What comes after the pass must not fail: the step would be made twice.
        for member, (chunk, ends) in zip(
            members, self.passes.step(members), strict=True
        ):
            self._tell(member, chunk)
            if ends:
                self._end(member)

    def _tell(self, member: Member, chunk: Any) -> None:
        if not tells(chunk):
            return
        self._emit(member.key, [chunk])
        self._is_news |= not member.has_told
        member.has_told = True

    # Memory

    def _does_not_fit(self, members: Sequence[Member]) -> bool:
        """Learn from a pass without memory; whether it waits for some."""
        if members[0].key in self._running:
            rows = sum(member.rows for member in members)
            self.slots.step_did_not_fit(rows, self._clock())
            return False
        others = self._held
        if len(members) > 1 or not others:
            return False
        self.slots.start_did_not_fit(others, self._clock())
        self.passes.release(members[0])
        self._waiting.appendleft(members[0])
        return True
