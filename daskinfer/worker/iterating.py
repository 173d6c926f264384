"""Iterators that models return: found out, run on the device, and joined."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from daskinfer import payload
from daskinfer.protocol import ASYNC_STREAM, PLAIN, STREAM
from daskinfer.worker.flow import Flow

_END: Any = object()


def entry_of(model: Callable[..., Any], is_module: bool) -> Callable[..., Any]:
    """What of a model is called: the ``stream`` method of a module that has one."""
    own = getattr(type(model), "stream", None) if is_module else None
    return model.stream if callable(own) else model  # type: ignore[attr-defined]


def kind_of(entry: Callable[..., Any], is_module: bool) -> str:
    """How a model answers, as far as that can be seen before it is called.

    What a call returns decides in the end.

    Examples
    --------
    >>> def count(n):
    ...     yield from range(n)
    >>> kind_of(count, False), kind_of(len, False)
    ('stream', '')
    """
    candidates: list[Any] = [entry, type(entry).__call__]
    if is_module:
        candidates.append(getattr(entry, "forward", None))
    if any(map(inspect.isasyncgenfunction, candidates)):
        return ASYNC_STREAM
    return STREAM if any(map(inspect.isgeneratorfunction, candidates)) else PLAIN


def is_stream(output: object) -> bool:
    """Whether an output comes piece by piece.

    >>> is_stream(iter([1])), is_stream([1])
    (True, False)
    """
    return isinstance(output, Iterator | AsyncIterator)


class Outputs:
    """A model's iterator, each of whose outputs is computed in a certain way.

    Parameters
    ----------
    compute
        Calls a function on the device, and brings what it returns to the host.
    outputs
        What the model has returned.
    """

    def __init__(
        self, compute: Callable[[Callable[[], Any]], Any], outputs: Iterator[Any]
    ) -> None:
        self._compute = compute
        self._outputs = outputs

    def __repr__(self) -> str:
        return f"<Outputs of {self._outputs!r}>"

    def __iter__(self) -> Outputs:
        return self

    def __next__(self) -> Any:
        return self._compute(self._outputs.__next__)

    def close(self) -> None:
        """Have the model stop where it is."""
        close = getattr(self._outputs, "close", None)
        if close is not None:
            self._compute(close)


class AsyncOutputs:
    """The same of an asynchronous iterator; it runs on a thread made for it."""

    def __init__(
        self, bring: Callable[[Any], Any], outputs: AsyncIterator[Any]
    ) -> None:
        self._bring = bring
        self._outputs = outputs

    def __repr__(self) -> str:
        return f"<AsyncOutputs of {self._outputs!r}>"

    def __aiter__(self) -> AsyncOutputs:
        return self

    async def __anext__(self) -> Any:
        return self._bring(await self._outputs.__anext__())

    async def aclose(self) -> None:
        """Have the model stop where it is."""
        close = getattr(self._outputs, "aclose", None)
        if close is not None:
            await close()


class Begun:
    """An iterator whose first output has been taken, and comes first nevertheless.

    Examples
    --------
    >>> list(Begun(iter("abc")))
    ['a', 'b', 'c']
    """

    def __init__(self, outputs: Iterator[Any]) -> None:
        self._outputs = outputs
        self._first = next(outputs, _END)

    def __iter__(self) -> Begun:
        return self

    def __next__(self) -> Any:
        first, self._first = self._first, _END
        return next(self._outputs) if first is _END else first

    def close(self) -> None:
        """Have the model stop where it is."""
        close = getattr(self._outputs, "close", None)
        if close is not None:
            close()


def joined(flows: Sequence[Flow], batch_dim: int) -> Iterator[Any]:
    """Outputs for a request that is too large for one pass, of those for its parts.

    Each has the rows of the parts that have not ended.
    """
    live = list(flows)
    try:
        while live:
            chunks, sizes, left = [], [], []
            for flow in live:
                rows = flow.rows
                (emission,) = flow.step()
                if emission.chunks:
                    chunks += emission.chunks
                    sizes.append(rows)
                if not emission.ended:
                    left.append(flow)
            live = left
            if chunks:
                yield payload.join_outputs(chunks, sizes, batch_dim)
    finally:
        for flow in live:
            flow.close()
