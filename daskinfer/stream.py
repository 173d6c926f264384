"""An answer that comes piece by piece, and who reads it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from distributed.core import clean_exception

from daskinfer import transport
from daskinfer.leaving import Leaving
from daskinfer.loss import told_as_lost
from daskinfer.protocol import LEFT, OPEN
from daskinfer.reading import Part, StreamState

if TYPE_CHECKING:
    from distributed import Future

    from daskinfer.protocol import StreamOrder
    from daskinfer.reading import Inbox, Readings


class Stream(Leaving):
    """The chunks of one request, as the model gives them.

    Made by :meth:`Model.stream`. Read it with ``for``, or with ``async for``::

        for chunk in model.stream(x):
            ...

    Whoever leaves the loop, or lets go of the stream, has the model stop at its next
    step. As a context manager it is closed for sure::

        with model.stream(x) as chunks:
            first = next(chunks)

    Parameters
    ----------
    future
        The future of the whole.
    order
        What was asked for.
    readings
        Tells how far it is read.

    Notes
    -----
    To be read by one thread or coroutine at a time. Chunks are unpickled there.
    """

    def __init__(
        self, future: Future[Any], order: StreamOrder, readings: Readings
    ) -> None:
        state = future._state
        assert isinstance(state, StreamState)
        self._future = future
        self._state = state
        self._readings = readings
        self._half = order["chunks"] / 2, order["nbytes"] / 2
        self._chunks: deque[Any] = deque()
        self._part: Part | None = None
        self._taken = 0
        self._untold = self._untold_bytes = 0
        self._is_shared = False
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Stream {self._future.key!r} {self._state.status} read: {self._taken}>"

    @property
    def future(self) -> Future[Any]:
        """The Dask future of the whole: all chunks in a list, or combined.

        From now on the model does not wait for who reads the chunks: those that are not
        read yet wait in this process. The future goes on if the stream is closed.
        """
        if not self._is_shared:
            self._is_shared = True
            self._readings.tell(self._future.key, OPEN)
        return self._future

    @property
    def begun(self) -> Inbox:
        """Done, as a future is, when there is something to read, or nothing will be."""
        return self._state.inbox

    # Reading

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        """Wait for the next chunk.

        Raises
        ------
        StopIteration
            There are no more.
        Exception
            What the model has raised after the chunks before, or what else has ended
            the stream.
        """
        if self._future.client.asynchronous:
            raise RuntimeError(
                "with an asynchronous client, read a stream with `async for`"
            )
        while not (self._chunks or self._is_over):
            self._unpack(self._state.inbox.take())
        if not self._chunks:
            raise StopIteration
        return self._next()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        """Wait for the next chunk, as :meth:`__next__` does."""
        while not (self._chunks or self._is_over):
            self._unpack(await self._state.inbox.take_async())
        if not self._chunks:
            raise StopAsyncIteration
        return self._next()

    def _unpack(self, part: Part | None) -> None:
        if part is None:
            self._is_over = True
            self._raise_failure()
            return
        self._part = part
        if part.pack["header"]:
            values = transport.unpack(part.pack["header"], part.pack["frames"])
            self._chunks.extend(values[part.skip :])
        self._untold_bytes += part.nbytes
        self._tell_if_needed()

    def _next(self) -> Any:
        chunk = self._chunks.popleft()
        self._taken += 1
        self._untold += 1
        self._tell_if_needed()
        return chunk

    def _tell_if_needed(self) -> None:
        """Ask for more when half of what may be unread is read, or the worker waits."""
        chunks, nbytes = self._half
        waits = self._part is not None and self._part.more and not self._chunks
        if self._is_shared or not (
            waits
            or self._untold >= chunks
            or (self._untold_bytes >= nbytes and not self._chunks)
        ):
            return
        self._untold = self._untold_bytes = 0
        self._readings.tell(self._future.key, self._taken)

    def _raise_failure(self) -> None:
        state = self._state
        if state.status == "error":
            _, error, traceback = clean_exception(state.exception, state.traceback)
            assert error is not None
            raise error.with_traceback(traceback)
        if state.status == "cancelled":
            with told_as_lost(self._future.client):
                raise state.exception

    # Leaving

    def close(self) -> None:
        """Stop reading: the model stops, unless somebody waits for the whole.

        Harmless when repeated, or when the stream has ended.
        """
        was_over, self._is_over = self._is_over, True
        self._chunks.clear()
        self._state.inbox.clear()
        if not self._is_shared:
            self._future.release()
        elif not was_over:
            self._readings.tell(self._future.key, LEFT)

    def __del__(self) -> None:
        if not self._is_over:
            self.close()
