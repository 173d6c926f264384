"""Passes over requests that advance step by step: their starts, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer import payload
from daskinfer.exceptions import InferenceError
from daskinfer.failure import contain
from daskinfer.wording import counted
from daskinfer.worker.slots import Slots
from daskinfer.worker.states import States

if TYPE_CHECKING:
    from daskinfer.worker.device_steps import DeviceSteps
    from daskinfer.worker.execution import Call, Item


@dataclass(slots=True, eq=False)
class Member:
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
        """The request's."""
        return self.item.key


class StepPasses:
    """Starts requests and has them step; keeps their states and their slots.

    A pass that raises has changed nothing here, so that it can be tried again.

    Parameters
    ----------
    steps
        The model.
    slots
        Told what passes take.
    batch_dim
        The axis along which requests are joined; None stacks samples.
    clock
        Seconds, to time passes with.
    """

    def __init__(
        self,
        steps: DeviceSteps,
        slots: Slots,
        batch_dim: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.states = States(batch_dim or 0)
        self.free = list(range(steps.room or 0))[::-1]
        self._steps = steps
        self._slots = slots
        self._batch_dim = batch_dim
        self._clock = clock

    def __repr__(self) -> str:
        return f"<StepPasses of {self._steps!r}: {self.states!r}>"

    def member(self, item: Item) -> Member:
        """Unpickle a request and size it up.

        Raises
        ------
        InferenceError
            It has more rows than can ever step together.
        Exception
            It cannot be read.
        """
        call, answer_arrays = self._steps.prepared(contain(item.load))
        measured = contain(payload.measure, *call, self._batch_dim)
        item.call = call
        item.signature, item.rows = measured.signature, measured.rows
        refusal = self._slots.refusal(item.rows)
        if refusal is not None:
            raise InferenceError(refusal)
        return Member(item, call, item.rows, item.signature, answer_arrays)

    def refuse_without_slots(self, member: Member) -> None:
        """Fail for one that cannot be started now, if it cannot wait either.

        Raises
        ------
        InferenceError
            Others have the slots.
        """
        if self._steps.room is not None and member.rows > len(self.free):
            raise InferenceError(
                f"the model has {self._steps.room} slots, and {len(self.free)} are "
                f"free for a request of {counted(member.rows, 'row')} that another "
                "model makes: it cannot wait, as that model has the device"
            )

    def release(self, member: Member) -> None:
        """Forget a request; its slots are free."""
        self.states.drop([member.key])
        self.free += member.slots[::-1]
        member.slots = []

    def family(self, member: Member) -> Hashable:
        """Equal for those that can step together; None for one that steps alone."""
        return self.states.family(member.key)

    def start(self, members: Sequence[Member]) -> None:
        """Start requests of one signature."""
        first, rows = members[0], sum(member.rows for member in members)
        pad_to = None
        for member in members:
            while self._steps.room is not None and len(member.slots) < member.rows:
                member.slots.append(self.free.pop())
        slots = [slot for member in members for slot in member.slots]
        if first.signature is None:
            call = payload.copy_arrays(first.call)
        else:
            pad_to = self._slots.padded(rows)
            calls = [member.call for member in members]
            call = payload.collate(calls, self._batch_dim, pad_to)
            slots += slots[-1:] * ((pad_to or rows) - rows)
        began = self._clock()
        state = self._steps.start(call, slots)
        self._keep(members, state, (pad_to or rows) - rows)
        self._slots.started(first.signature, rows, self._clock() - began)
        for member in members:
            # Its inputs are in the state, as far as they are needed.
            member.call = member.item.call = ((), {})

    def step(self, members: Sequence[Member]) -> list[tuple[Any, bool]]:
        """Have requests of one family step; give what each is told, and if it ends."""
        keys, sizes = [m.key for m in members], [m.rows for m in members]
        rows, pad_to, total = sum(sizes), None, None
        began = self._clock()
        is_joined = members[0].signature is not None
        if self.states.family(keys[0]) is not None:
            pad_to = self._slots.padded(rows)
        if is_joined:
            total = pad_to or rows
        stepped = self._steps.step(self.states.joined(keys, pad_to), total)
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
        self._slots.stepped(rows, self._clock() - began, self._clock())
        return list(zip(chunks, ended, strict=True))

    def _keep(self, members: Sequence[Member], state: Any, padding: int) -> None:
        sizes = {member.key: member.rows for member in members}
        is_alone = members[0].signature is None
        self.states.put(sizes, state, padding, is_alone=is_alone)

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
        most = min(rows, self._slots.max_rows)
        state = self._steps.start(call, [min(n, most - 1) for n in range(rows)])
        began = self._clock()
        self._steps.step(state, rows)
        now = self._clock()
        self._slots.stepped(most, now - began, now)
