"""What ``imap`` and ``aimap`` return: iterators over results."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from daskinfer.exceptions import SchedulerLost, UnknownDeployment
from daskinfer.imap import sources
from daskinfer.imap.flow import Flow
from daskinfer.imap.signals import LoopSignal, Signal

if TYPE_CHECKING:
    from types import TracebackType

    from distributed import Client

    from daskinfer.handle import Model
    from daskinfer.imap.window import Outcome
    from daskinfer.options import CallOptions

Self = TypeVar("Self", bound="Results")

#: What is about the deployment, and would become of every input from now on.
_ABOUT_ALL = (SchedulerLost, UnknownDeployment)


@dataclass(frozen=True)
class Job:
    """What is to be done with which inputs.

    Parameters
    ----------
    client, model, options, kwargs
        What is called, how, and the keywords that go to the model.
    inputs
        What the user passed.
    ordered, given, returns_errors
        How results are given, and how many requests there may be.
    """

    client: Client
    model: Model
    options: CallOptions
    kwargs: dict[str, Any]
    inputs: Any
    ordered: bool
    given: int | None
    returns_errors: bool

    def flow(self, results: Signal, room: Signal) -> Flow:
        """What carries it out."""
        return Flow(
            self.client,
            self.model,
            self.options,
            self.kwargs,
            ordered=self.ordered,
            given=self.given,
            results=results,
            room=room,
        )


class Results:
    """What both kinds of iterators have in common.

    Parameters
    ----------
    job
        What is to be done.
    inputs
        What is read.
    flow
        Carries it out.

    Notes
    -----
    Nothing is read or sent before the first result is asked for.
    """

    def __init__(self, job: Job, inputs: Any, flow: Flow) -> None:
        self._model = job.model
        self._returns_errors = job.returns_errors
        #: None as soon as it need not be read any more: it may hold resources.
        self._inputs = inputs
        self._flow = flow
        self._is_started = False
        self._is_over = False
        self._stop_reading: Callable[[], object] | None = None
        self._length = sources.length(job.inputs)
        self._hint = sources.length_hint(job.inputs)

    def __repr__(self) -> str:
        state = "ended" if self._is_over else "running"
        state = state if self._is_started else "not started"
        return f"<{type(self).__name__} of {self._model!r} {state}>"

    def __len__(self) -> int:
        """How many results are still to come.

        Raises
        ------
        TypeError
            If the inputs do not tell.
        """
        if self._length is None:
            raise TypeError("how many inputs there are is not known")
        return max(self._length - self._flow.taken, 0)

    def __bool__(self) -> bool:
        return True

    def __length_hint__(self) -> Any:
        if self._hint is None:
            return NotImplemented
        return max(self._hint - self._flow.taken, 0)

    def __del__(self) -> None:
        # One whose making failed has none of this.
        if getattr(self, "_is_started", False) and not self._is_over:
            self._flow.abandon()
            if self._stop_reading is not None:
                self._stop_reading()

    def _close(self) -> None:
        self._is_over = True
        self._inputs = None
        stop_reading, self._stop_reading = self._stop_reading, None
        if self._is_started:
            self._flow.close()
        if stop_reading is not None:
            stop_reading()

    def _read_in_thread(self, room: threading.Event) -> None:
        sources.read_in_thread(self._flow, self._inputs, room)
        if isinstance(self._inputs, sources.Partitions):
            self._stop_reading = self._inputs.close

    def _due(self) -> Outcome | None:
        """The result that is due next, if it is here; ends if none will be."""
        # Asked for first: the last one may come in between.
        is_over = self._flow.is_over
        outcome = self._flow.take()
        if outcome is None and is_over:
            self._end()
        return outcome

    def _give(self, outcome: Outcome) -> Any:
        error = outcome.error
        if error is None:
            return outcome.value
        if self._returns_errors and not isinstance(error, _ABOUT_ALL):
            return error
        self._close()
        raise _raisable(error)

    def _end(self) -> None:
        """Say why there are no more results, unless it is that all were given."""
        self._close()
        error = self._flow.error
        if error is not None:
            raise _raisable(error)


class Imap(Results, Iterator[Any]):
    """The results of :meth:`daskinfer.Model.imap`, one after the other.

    Close it, or leave the ``with`` block that it is used in, to cancel what is on its
    way; so does letting go of it. ``len()`` tells how many results are still to come,
    if the inputs tell.

    Notes
    -----
    Thread-safe: several threads that iterate share the results.
    """

    def __init__(self, job: Job) -> None:
        self._ready, self._room = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        inputs = sources.inputs_of(job.client, job.inputs)
        super().__init__(job, inputs, job.flow(self._ready, self._room))

    def __next__(self) -> Any:
        with self._lock:
            self._start()
        while not self._is_over:
            outcome = self._due()
            if outcome is not None:
                return self._give(outcome)
            if not self._is_over:
                self._ready.wait()
        raise StopIteration

    def _start(self) -> None:
        if not (self._is_started or self._is_over):
            self._is_started = True
            self._flow.start()
            self._read_in_thread(self._room)

    def close(self) -> None:
        """Cancel what is on its way; there are no more results.

        Returns at once. A thread that is reading the inputs ends when it gets the next
        one.
        """
        self._close()

    def __enter__(self) -> Imap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()


class AsyncImap(Results, AsyncIterator[Any]):
    """The results of :meth:`daskinfer.Model.aimap`, one after the other.

    As :class:`Imap`, for ``async for`` and ``async with``. A coroutine that is
    cancelled while it waits for a result has taken none.
    """

    def __init__(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self._ready = LoopSignal(loop)
        is_async = isinstance(job.inputs, AsyncIterable)
        self._room = LoopSignal(loop) if is_async else threading.Event()
        inputs = job.inputs
        if not is_async:
            inputs = sources.inputs_of(job.client, inputs)
        super().__init__(job, inputs, job.flow(self._ready, self._room))

    async def __anext__(self) -> Any:
        self._start()
        while not self._is_over:
            outcome = self._due()
            if outcome is not None:
                return self._give(outcome)
            if not self._is_over:
                await self._ready.wait()
        raise StopAsyncIteration

    def _start(self) -> None:
        if self._is_started or self._is_over:
            return
        self._is_started = True
        self._flow.start()
        if isinstance(self._room, LoopSignal):
            loop = asyncio.get_running_loop()
            task = loop.create_task(
                sources.read_in_task(self._flow, self._inputs, self._room)
            )

            def stop() -> None:
                # A task whose loop is closed has been stopped.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)

            self._stop_reading = stop
        else:
            self._read_in_thread(self._room)

    async def aclose(self) -> None:
        """Cancel what is on its way; there are no more results."""
        self._close()

    async def __aenter__(self) -> AsyncImap:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()


def _raisable(error: BaseException) -> BaseException:
    """What to raise for an error: two kinds would end the loop without a word."""
    if isinstance(error, StopIteration | StopAsyncIteration):
        raised = RuntimeError(f"an input has led to {error!r}")
        raised.__cause__ = error
        return raised
    return error
