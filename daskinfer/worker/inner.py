"""Models that other models call: they run at once, on the device's own thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, NoReturn

from distributed.metrics import monotonic

from daskinfer.exceptions import DeadlineExceeded
from daskinfer.leaving import Leaving
from daskinfer.protocol import STEPS
from daskinfer.wording import counted
from daskinfer.worker.execution import Item
from daskinfer.worker.flow import END, Flow, chunks_of

if TYPE_CHECKING:
    from daskinfer.options import CallOptions
    from daskinfer.worker.execution import Call
    from daskinfer.worker.models import ResidentModel

#: The key of what has none.
_KEY = "call"


class InnerStream(Leaving):
    """The chunks of one model that another one reads, computed as they are read.

    Read and left as a :class:`daskinfer.Stream`. Nothing is computed ahead, and nothing
    is kept, so that there is no future.

    Parameters
    ----------
    model
        Whose they are.
    chunks
        Gives them, and stops the model where it is closed.
    timeout
        Seconds from now after which there are no more of them; None: no matter.

    Notes
    -----
    To be read where it was made: on the thread that runs the device.
    """

    def __init__(
        self, model: ResidentModel, chunks: Generator[Any], timeout: float | None
    ) -> None:
        self._model = model
        self._chunks = chunks
        self._timeout = timeout
        self._began = monotonic()
        self._count = 0

    def __repr__(self) -> str:
        return f"<InnerStream of {self._model.name!r} read: {self._count}>"

    @property
    def future(self) -> NoReturn:
        """There is none.

        Raises
        ------
        RuntimeError
            Always.
        """
        name = self._model.name
        raise RuntimeError(
            f"a stream of {name!r} has no future inside a model, as its chunks are "
            "computed when they are read; for all of them, call the model"
        )

    def __iter__(self) -> InnerStream:
        return self

    def __next__(self) -> Any:
        """Compute the next chunk.

        Raises
        ------
        StopIteration
            There are no more.
        DeadlineExceeded
            The timeout has passed.
        Exception
            What the model raises.
        """
        timeout = self._timeout
        if timeout is not None and monotonic() - self._began >= timeout:
            self._refuse_late(timeout)
        chunk = next(self._chunks)
        self._count += 1
        return chunk

    def _refuse_late(self, timeout: float) -> NoReturn:
        self.close()
        name, version = self._model.name, self._model.version
        raise DeadlineExceeded(
            f"the stream of {name!r} that another model reads had not ended after "
            f"{timeout:g} s, and {counted(self._count, 'chunk')}",
            name=name,
            version=version,
        )

    def __aiter__(self) -> InnerStream:
        return self

    async def __anext__(self) -> Any:
        """As :meth:`__next__`; nothing else runs on this thread meanwhile."""
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Stop reading: the model stops where it is. Harmless when repeated."""
        self._chunks.close()


def stream_inner(model: ResidentModel, options: CallOptions, call: Call) -> InnerStream:
    """Begin one request, to be read chunk by chunk.

    Raises
    ------
    TypeError
        The model gives one result.
    ValueError
        With ``key=``, as anywhere.
    Exception
        What the model raises.
    """
    if options.key is not None:
        raise ValueError("key= names a result that many may share; call the model")
    chunks, _ = _begun(model, call)
    if chunks is None:
        raise TypeError(f"{model.name!r} does not answer piece by piece")
    return InnerStream(model, chunks, options.timeout)


def call_inner(model: ResidentModel, options: CallOptions, call: Call) -> Any:
    """Run one request to its end, outside any batch.

    Whatever the caller waited for instead would wait for the thread that it runs on.

    Raises
    ------
    Exception
        What the model raises, or what ``combine`` does.
    """
    chunks, result = _begun(model, call)
    if chunks is None:
        return result
    with InnerStream(model, chunks, options.timeout) as stream:
        if not options.keep:
            for _ in stream:
                pass
            return None
        whole = list(stream)
    return whole if options.combine is None else options.combine(whole)


def _begun(model: ResidentModel, call: Call) -> tuple[Generator[Any] | None, Any]:
    """The chunks of a model that answers piece by piece, else its result."""
    if model.kind == STEPS:
        return model.producer.alone(call), None
    outcome = model.run([Item(_KEY, lambda: call)], [], model.max_rows)
    if outcome.broken is not None:
        raise outcome.broken
    if outcome.errors:
        raise outcome.errors[_KEY]
    for flow in outcome.flows:
        is_async = hasattr(flow.outputs, "__anext__")
        return (_awaited(model, flow) if is_async else _read(flow)), None
    return None, outcome.results[_KEY]


def _read(flow: Flow) -> Generator[Any]:
    try:
        yield from chunks_of(flow)
    finally:
        flow.close()


def _awaited(model: ResidentModel, flow: Flow) -> Generator[Any]:
    """The same of an asynchronous generator, which has this thread to itself."""
    import torch

    outputs = flow.outputs

    async def following() -> Any:
        return await anext(outputs, END)

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with model.device.active(), torch.inference_mode():
            return loop.run_until_complete(coroutine)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        try:
            while flow.wanted:
                output = run(following())
                # Results must not be tensors of inference mode.
                given = flow.ended() if output is END else flow.give(output)
                for emission in given:
                    yield from emission.chunks
        finally:
            run(outputs.aclose())
            run(loop.shutdown_asyncgens())


__all__ = ["InnerStream", "call_inner", "stream_inner"]
