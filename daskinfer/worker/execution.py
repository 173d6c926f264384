"""A batch through a model: sorted, joined, padded, run and divided again.

Runs on the device's own thread; knows neither workers nor the event loop.
"""

from __future__ import annotations

import contextlib
import traceback
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol, TypeAlias

from dask.typing import Key

from daskinfer import payload
from daskinfer.exceptions import OutputMismatch
from daskinfer.failure import contain
from daskinfer.payload import AmbiguousOutput
from daskinfer.protocol import Pass
from daskinfer.worker.flow import Flow
from daskinfer.worker.footprint import Footprint
from daskinfer.worker.iterating import Begun, is_stream, joined

#: Positional and keyword arguments of one request.
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Item:
    """One request on its way through the device."""

    key: Key
    load: Callable[[], Call]
    call: Call = field(default_factory=lambda: ((), {}))
    signature: str | None = None
    rows: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of a batch: each key is in ``results`` or in ``errors``.

    Unless the device broke: then those of the pass that found out are ``struck``, and
    what should have come after it is nowhere.
    """

    results: dict[Key, Any] = field(default_factory=dict)
    errors: dict[Key, BaseException] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    #: Rows of the smallest pass that the device had no memory for; 0 if all fitted.
    #: Passes with a request that does not fit alone say nothing about others.
    out_of_memory: int = 0
    #: Why nothing runs on the device any more.
    broken: BaseException | None = None
    struck: list[Key] = field(default_factory=list)
    #: Those of the results that were not computed for their request; and seconds that
    #: looking for all of them took.
    cached: set[Key] = field(default_factory=set)
    look_up: float = 0.0
    #: Names of the results that are in the cache from now on.
    kept: bytes = b""
    #: What comes piece by piece; each request of theirs is in no other place.
    flows: list[Flow] = field(default_factory=list)
    #: What joins others that advance step by step.
    joining: list[Item] = field(default_factory=list)

    @property
    def streaming(self) -> list[Key]:
        """Requests that are answered piece by piece."""
        flowing = [key for flow in self.flows for key in flow.asked]
        return flowing + [item.key for item in self.joining]


@dataclass(frozen=True, slots=True)
class PassSizes:
    """How many rows forward passes may have.

    Parameters
    ----------
    rows
        Rows of a pass at most.
    first
        Rows of the first passes of a request that is cut.
    allowed
        Ascending sizes to pad to; None allows all.
    """

    rows: int
    first: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None

    def padded(self, rows: int) -> int | None:
        """The size to pad to, or None where nothing is to be padded.

        >>> PassSizes(16, allowed=(1, 4, 16)).padded(5)
        16
        """
        if not self.allowed:
            return None
        return self.allowed[min(bisect_left(self.allowed, rows), len(self.allowed) - 1)]

    def below(self, rows: int) -> PassSizes | None:
        """The sizes that are left when passes of so many rows do not fit.

        >>> PassSizes(64).below(40).rows, PassSizes(16, allowed=(4, 16)).below(4)
        (20, None)
        """
        half = min(rows, self.rows) // 2
        if self.allowed:
            half = max((size for size in self.allowed if size <= half), default=0)
        return replace(self, rows=half, first=()) if half else None

    def cuts(self, rows: int) -> Iterator[tuple[int, int]]:
        """Bounds of the passes of one request.

        >>> list(PassSizes(4, first=(1,)).cuts(10))
        [(0, 1), (1, 5), (5, 9), (9, 10)]
        """
        start = 0
        sizes = iter(self.first)
        while start < rows:
            stop = min(start + min(next(sizes, self.rows), self.rows), rows)
            yield start, stop
            start = stop


class Memory(Protocol):
    """What a run needs to know of its device: see :class:`daskinfer.device.Device`."""

    def is_out_of_memory(self, exc: BaseException, /) -> bool:
        """Whether a pass would have fitted if it were smaller."""

    def is_fatal(self, exc: BaseException, /) -> bool:
        """Whether nothing runs on the device any more."""

    def empty_cache(self) -> None:
        """Give memory back that is cached."""


class BatchRun:
    """One batch on one model.

    A request that the model fails on fails alone: a pass that raised is run again
    in halves, which takes O(k log n) passes for k bad requests of n. A pass that
    does not fit the device's memory is run again in smaller ones. When the device
    itself has failed, nothing more is run.

    Parameters
    ----------
    model
        Called with the arguments of a pass; returns its output on the CPU.
    batch_dim
        The axis along which requests are joined; None stacks samples.
    sizes
        How large passes may be.
    zero_rows
        Turns the call of a request without rows into one the model accepts.
    device
        Tells errors of the device from those of the inputs; None: there are none.
    probe
        Runs the model on what the device had memory for before. If it has none for
        that either, its memory is lost, and it counts as broken.
    footprint
        Knows what passes take of the device's memory; None: nobody is asked.
    alone
        Whether no request shares a pass with others.
    about
        What log lines say that they are about, as :class:`~daskinfer.logs.Log` has it.

    Examples
    --------
    >>> import numpy as np
    >>> run = BatchRun(lambda x: x * 2, 0, PassSizes(rows=3))
    >>> items = [Item(i, lambda i=i: ((np.full((2, 1), i),), {})) for i in range(2)]
    >>> outcome = run(items)
    >>> outcome.results[1].tolist(), [p["rows"] for p in outcome.passes]
    ([[2], [2]], [2, 2])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        batch_dim: int | None,
        sizes: PassSizes,
        zero_rows: Callable[[Call], Call] | None = None,
        device: Memory | None = None,
        probe: Callable[[], object] | None = None,
        footprint: Footprint | None = None,
        *,
        alone: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._batch_dim = batch_dim
        self._sizes = sizes
        self._zero_rows = zero_rows
        self._device = device
        self._probe = probe
        self._footprint = footprint
        self._alone = alone
        self._about = about
        self._outcome = Outcome()
        self._did_not_fit: list[tuple[int, set[Key]]] = []
        self._never_fit: set[Key] = set()

    def __call__(self, items: Iterable[Item]) -> Outcome:
        """Run the requests; their own errors end up in the outcome."""
        for group in self._groups(items):
            self._attempt_all(group)
        self._outcome.out_of_memory = min(
            (rows for rows, keys in self._did_not_fit if not keys & self._never_fit),
            default=0,
        )
        return self._outcome

    def _groups(self, items: Iterable[Item]) -> Iterable[list[Item]]:
        """Requests that may share a pass; the scheduler could not see inside all."""
        groups: dict[Hashable, list[Item]] = {}
        for item in items:
            try:
                item.call = contain(item.load)
                measured = contain(payload.measure, *item.call, self._batch_dim)
            except Exception as error:
                self._outcome.errors[item.key] = error
                continue
            item.signature, item.rows = measured.signature, measured.rows
            shared = item.signature is not None and item.rows > 0 and not self._alone
            groups.setdefault(item.signature if shared else item.key, []).append(item)
        return groups.values()

    def _passes(self, group: list[Item]) -> Iterator[list[Item]]:
        members: list[Item] = []
        rows = 0
        for item in group:
            if members and rows + item.rows > self._sizes.rows:
                yield members
                members, rows = [], 0
            members.append(item)
            rows += item.rows
        yield members

    def _attempt_all(self, items: list[Item]) -> None:
        for members in self._passes(items):
            self._attempt(members)

    def _attempt(self, members: list[Item], *, is_last: bool = False) -> None:
        if self._outcome.broken is not None:
            return
        try:
            results = contain(self._run, members)
        except Exception as error:
            failure = error
        else:
            if isinstance(results, Flow):
                self._outcome.flows.append(results)
                return
            for member, result in zip(members, results, strict=True):
                self._outcome.results[member.key] = result
            return
        # Outside: what the parts raise does not come of what the whole has raised.
        self._failed(members, failure, is_last)

    def _failed(self, members: list[Item], error: Exception, is_last: bool) -> None:
        """Find out whose fault it was, and answer all others."""
        if self._device is not None and self._device.is_fatal(error):
            self._break(members, error)
        elif self._device is not None and self._device.is_out_of_memory(error):
            self._shrink(self._device, members, error, is_last)
        elif len(members) > 1 and isinstance(error, AmbiguousOutput):
            for member in members:
                self._attempt([member])
        elif len(members) > 1 and not isinstance(error, OutputMismatch):
            # A model that gives back too little does so for any input.
            middle = len(members) // 2
            self._attempt(members[:middle])
            self._attempt(members[middle:])
        else:
            for member in members:
                self._outcome.errors[member.key] = error

    def _break(self, members: list[Item], error: Exception) -> None:
        # It is kept for as long as the worker is; its frames hold tensors.
        traceback.clear_frames(error.__traceback__)
        self._outcome.broken = error
        self._outcome.struck = [member.key for member in members]

    # Memory

    def _shrink(
        self, device: Memory, members: list[Item], error: Exception, is_last: bool
    ) -> None:
        """Run smaller passes where these did not fit."""
        # What the failed pass had computed so far hangs on the frames it ran in.
        traceback.clear_frames(error.__traceback__)
        device.empty_cache()
        rows = self._largest_pass(members)
        keys = {member.key for member in members}
        self._did_not_fit.append((rows, keys))
        smaller = self._sizes.below(rows)
        if smaller is not None:
            self._sizes = smaller
            self._attempt_all(members)
        elif not is_last:
            self._attempt(members, is_last=True)
        else:
            self._never_fit |= keys
            if self._is_memory_lost(device):
                self._break(members, error)
                return
            for member in members:
                self._outcome.errors[member.key] = error

    def _largest_pass(self, members: list[Item]) -> int:
        """Rows, with padding, of the largest pass that requests are run in."""
        rows = min(sum(member.rows for member in members), self._sizes.rows)
        return self._sizes.padded(rows) or rows

    def _is_memory_lost(self, device: Memory) -> bool:
        """Whether nothing fits any more, so that the request is not to blame."""
        if self._probe is None:
            return False
        try:
            contain(self._probe)
        except Exception as error:
            return device.is_out_of_memory(error) or device.is_fatal(error)
        return False

    def _run(self, members: list[Item]) -> Sequence[Any] | Flow:
        first = members[0]
        if first.signature is None:
            call = payload.copy_arrays(first.call)
            output = self._forward(call, 1, 1, 1)
            if is_stream(output):
                return _begun(Flow(output, members, about=self._about))
            return [payload.copy_arrays(output)]
        if first.rows == 0:
            call = self._zero_rows(first.call) if self._zero_rows else first.call
            return self._pass(members, [call], [0], None)
        if first.rows > self._sizes.rows:
            return self._in_parts(first)
        calls, sizes = [m.call for m in members], [m.rows for m in members]
        return self._pass(members, calls, sizes, first.signature)

    def _in_parts(self, item: Item) -> Sequence[Any] | Flow:
        """Run a request that is too large for one pass."""
        assert self._batch_dim is not None, "a sample has one row"
        outputs: list[Any] = []
        sizes: list[int] = []
        flows: list[Flow] = []
        for start, stop in self._sizes.cuts(item.rows):
            part = payload.slice_rows(*item.call, self._batch_dim, start, stop)
            rows = [stop - start]
            found = self._pass([item], [part], rows, item.signature, begin=False)
            if isinstance(found, Flow):
                flows.append(found)
            else:
                outputs += found
                sizes.append(stop - start)
        if flows:
            outputs_of_all = joined(flows, self._batch_dim)
            return _begun(Flow(outputs_of_all, [item], about=self._about))
        return [payload.join_outputs(outputs, sizes, self._batch_dim)]

    def _pass(
        self,
        members: list[Item],
        calls: list[Call],
        sizes: list[int],
        signature: str | None,
        *,
        begin: bool = True,
    ) -> Sequence[Any] | Flow:
        rows, batch_dim = sum(sizes), self._batch_dim
        pad_to = self._sizes.padded(rows)
        call = payload.collate(calls, batch_dim, pad_to)
        with self._room_for(signature, pad_to or rows):
            output = self._forward(call, rows, pad_to or rows, len(calls))
        if is_stream(output):
            padding = 0 if pad_to is None else pad_to - rows
            flow = Flow(output, members, sizes, batch_dim, padding, self._about)
            return _begun(flow) if begin else flow
        return payload.split(output, sizes, batch_dim, pad_to)

    def _room_for(
        self, signature: str | None, rows: int
    ) -> contextlib.AbstractContextManager[None]:
        if self._footprint is None or signature is None:
            return contextlib.nullcontext()
        return self._footprint.of_pass(signature, rows)

    def _forward(self, call: Call, rows: int, padded: int, requests: int) -> Any:
        args, kwargs = call
        started = perf_counter()
        output = self._model(*args, **kwargs)
        if isinstance(output, Iterator):
            # What there is to compute, generators compute when they are asked.
            output = Begun(output)
        self._outcome.passes.append(
            {
                "rows": rows,
                "padded": padded,
                "requests": requests,
                "seconds": perf_counter() - started,
            }
        )
        return output


def _begun(flow: Flow) -> Flow:
    """One whose first output could be had and divided: until then it is tried again."""
    return flow.begin() if isinstance(flow.outputs, Iterator) else flow
