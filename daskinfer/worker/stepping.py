"""Continuous batching: a batch that requests join and leave at every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer import payload
from daskinfer.exceptions import InferenceError
from daskinfer.failure import contain
from daskinfer.stepping import tells
from daskinfer.worker.isolation import Isolation
from daskinfer.worker.producing import Emission
from daskinfer.worker.slots import Candidate, Slots
from daskinfer.worker.states import States

if TYPE_CHECKING:
    from daskinfer.worker.device_steps import DeviceSteps
    from daskinfer.worker.execution import Call, Item, Memory


@dataclass(slots=True, eq=False)
class _Member:
    """One request, from its arrival to its end."""

    item: Item
    call: Call
    rows: int
    #: What it can be started with; None: it shares passes with nobody.
    signature: str | None
    answer_arrays: bool
    slots: list[int] = field(default_factory=list)
    has_told: bool = False

    @property
    def key(self) -> Key:
        return self.item.key


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
        self._steps = steps
        self._batch_dim = batch_dim
        self._clock = clock
        self._isolation = Isolation(device, self._does_not_fit, self._end)
        self._waiting: deque[_Member] = deque()
        self._running: dict[Key, _Member] = {}
        self._states = States(batch_dim or 0)
        self._free = list(range(steps.room or 0))[::-1]
        self._told: dict[Key, Emission] = {}
        self._is_news = False

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

    def try_out(self, call: Call, rows: int) -> None:
        """Start what nobody has asked for, and step once, to see how long it takes.

        Only as long as nothing is live.

        Parameters
        ----------
        call
            With so many ``rows``, all alike.
        """
        call, _ = self._steps.prepared(call)
        # More than the model has room for is what it meets as padding.
        most = min(rows, self.slots.max_rows)
        state = self._steps.start(call, [min(n, most - 1) for n in range(rows)])
        began = self._clock()
        self._steps.step(state, rows)
        now = self._clock()
        self.slots.stepped(most, now - began, now)

    # Coming and going

    def add(self, items: list[Item]) -> None:
        """Let requests wait for their start."""
        for item in items:
            try:
                member = self._member(item)
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
            self._release(self._running.pop(key))
        for key in keys:
            self._told.pop(key, None)

    def close(self) -> None:
        """Let go of everything."""
        self.drop(self.live)

    def _member(self, item: Item) -> _Member:
        call, answer_arrays = self._steps.prepared(contain(item.load))
        measured = contain(payload.measure, *call, self._batch_dim)
        item.call = call
        item.signature, item.rows = measured.signature, measured.rows
        refusal = self.slots.refusal(item.rows)
        if refusal is not None:
            raise InferenceError(refusal)
        return _Member(item, call, item.rows, item.signature, answer_arrays)

    def _release(self, member: _Member) -> None:
        self._states.drop([member.key])
        self._free += member.slots[::-1]
        member.slots = []

    def _end(self, member: _Member, error: BaseException | None = None) -> None:
        self._running.pop(member.key, None)
        self._release(member)
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
        for members in self._passes(stepping):
            self._isolation.attempt(members, self._step)
        return bool(stepping) and self.broken is None

    @property
    def _held(self) -> int:
        return sum(member.rows for member in self._running.values())

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

    def _passes(self, members: Sequence[_Member]) -> list[list[_Member]]:
        candidates = [
            Candidate(m.key, m.rows, self._states.family(m.key)) for m in members
        ]
        return [
            [self._running[candidate.key] for candidate in part]
            for part in self.slots.passes(candidates)
        ]

    # Passes

    def _start(self, members: Sequence[_Member]) -> None:
        first, rows = members[0], sum(member.rows for member in members)
        pad_to = None
        for member in members:
            while self._steps.room is not None and len(member.slots) < member.rows:
                member.slots.append(self._free.pop())
        slots = [slot for member in members for slot in member.slots]
        if first.signature is None:
            call = payload.copy_arrays(first.call)
        else:
            pad_to = self.slots.padded(rows)
            calls = [member.call for member in members]
            call = payload.collate(calls, self._batch_dim, pad_to)
            slots += slots[-1:] * ((pad_to or rows) - rows)
        began = self._clock()
        state = self._steps.start(call, slots)
        self._keep(members, state, (pad_to or rows) - rows)
        self.slots.started(first.signature, rows, self._clock() - began)
        for member in members:
            # Its inputs are in the state, as far as they are needed.
            member.call = member.item.call = ((), {})
            self._running[member.key] = member

    def _step(self, members: Sequence[_Member]) -> None:
        keys, sizes = [m.key for m in members], [m.rows for m in members]
        rows, pad_to, total = sum(sizes), None, None
        began = self._clock()
        is_joined = members[0].signature is not None
        if self._states.family(keys[0]) is not None:
            pad_to = self.slots.padded(rows)
        if is_joined:
            total = pad_to or rows
        stepped = self._steps.step(self._states.joined(keys, pad_to), total)
        if is_joined:
            outputs, axis = stepped.outputs, self._batch_dim
            chunks = payload.split(outputs, sizes, axis, pad_to)
        else:
            chunks = [payload.copy_arrays(stepped.outputs)]
        chunks = [
            payload.to_numpy(chunk) if member.answer_arrays else chunk
            for member, chunk in zip(members, chunks, strict=True)
        ]
        flags, ended = iter(stepped.finished), []
        for member in members:
            its = [next(flags) for _ in range(member.rows)] if is_joined else flags
            ended.append(all(its))
        if not all(ended):
            self._keep(members, stepped.state, (pad_to or rows) - rows)
        # From here on nothing may fail: the step would be made twice.
        self.slots.stepped(rows, self._clock() - began, self._clock())
        for member, chunk, has_ended in zip(members, chunks, ended, strict=True):
            self._tell(member, chunk)
            if has_ended:
                self._end(member)

    def _keep(self, members: Sequence[_Member], state: Any, padding: int) -> None:
        sizes = {member.key: member.rows for member in members}
        is_alone = members[0].signature is None
        self._states.put(sizes, state, padding, is_alone=is_alone)

    def _tell(self, member: _Member, chunk: Any) -> None:
        if not tells(chunk):
            return
        self._emit(member.key, [chunk])
        self._is_news |= not member.has_told
        member.has_told = True

    # Memory

    def _does_not_fit(self, members: Sequence[_Member]) -> bool:
        """Learn from a pass without memory; whether it waits for some."""
        if members[0].key in self._running:
            rows = sum(member.rows for member in members)
            self.slots.step_did_not_fit(rows, self._clock())
            return False
        others = self._held
        if len(members) > 1 or not others:
            return False
        self.slots.start_did_not_fit(others, self._clock())
        self._release(members[0])
        self._waiting.appendleft(members[0])
        return True
