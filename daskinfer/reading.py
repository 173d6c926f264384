"""Chunks between a client's event loop and whoever reads them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from daskinfer import protocol
from daskinfer.exceptions import InferenceError
from daskinfer.future import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask.typing import Key
    from distributed import Client

    from daskinfer.protocol import Pack
    from daskinfer.submission import Submitter


class Part(NamedTuple):
    """Chunks that came together, of which the first ``skip`` had come before.

    ``more`` says that others wait on the worker until these are read.
    """

    pack: Pack
    skip: int
    nbytes: int
    more: bool


class Inbox:
    """The chunks of one stream that have come and are not taken.

    Notes
    -----
    Thread-safe. Chunks come on the client's event loop, and are taken by one reader at
    a time, in whatever thread or event loop.
    """

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()
        self._next = 0
        self._has_ended = False
        self._gap: InferenceError | None = None
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._callbacks: list[Callable[[Inbox], object]] = []

    def __repr__(self) -> str:
        return f"<Inbox parts: {len(self._parts)} ended: {self._has_ended}>"

    def arrive(
        self, first: int, count: int, nbytes: int, more: bool, pack: Pack
    ) -> None:
        """Chunks have come, numbered from ``first``."""
        with self._changed:
            if first > self._next and self._gap is None:
                # Cannot be, as all come on one connection: rather none than wrong ones.
                lost = f"chunks {self._next} to {first - 1} of a stream are lost"
                self._gap = InferenceError(f"{lost}: ask for it again")
                self._notify()
            if self._gap is not None:
                return
            skip = min(self._next - first, count)
            self._next += count - skip
            self._parts.append(Part(pack, skip, nbytes, more))
            self._notify()

    def end(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._has_ended = True
            self._notify()

    def clear(self) -> None:
        """Nobody will take anything any more."""
        with self._changed:
            self._parts.clear()

    def done(self) -> bool:
        """Whether there is something to take, or nothing will ever come."""
        with self._changed:
            return self._is_there

    def add_done_callback(self, function: Callable[[Inbox], object]) -> None:
        """Have a function called whenever that may have become so; it must not wait."""
        with self._changed:
            self._callbacks.append(function)
            if self._is_there:
                function(self)

    def take(self) -> Part | None:
        """Wait for chunks that came together, and take them; None: no more come.

        Raises
        ------
        InferenceError
            Those that follow never came.
        """
        with self._changed:
            while not self._is_there:
                self._changed.wait()
            return self._first()

    async def take_async(self) -> Part | None:
        """The same for a coroutine."""
        while True:
            with self._changed:
                if self._is_there:
                    return self._first()
                arrived = asyncio.Event()
                self._waiter = asyncio.get_running_loop(), arrived
            await arrived.wait()

    @property
    def _is_there(self) -> bool:
        return bool(self._parts) or self._has_ended or self._gap is not None

    def _first(self) -> Part | None:
        if self._parts:
            return self._parts.popleft()
        if self._gap is not None:
            raise self._gap
        return None

    def _notify(self) -> None:
        self._changed.notify_all()
        for function in self._callbacks:
            function(self)
        if self._waiter is not None:
            (loop, arrived), self._waiter = self._waiter, None
            # A loop that was closed has no reader any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.set)


class StreamState(RequestState):
    """The state of a future whose chunks are read: its end is that of the stream."""

    __slots__ = ("inbox",)

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.inbox = Inbox()

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """All chunks have come."""
        super().finish(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.inbox.end()

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        """No more will come."""
        super().cancel(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.inbox.end()

    def set_error(self, *args: Any, **kwargs: Any) -> None:
        """No more will come, for a reason."""
        super().set_error(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.inbox.end()


class Readings:
    """Tells the scheduler how far the streams of a client are read.

    Parameters
    ----------
    submitter
        Sends messages of the client in order.

    Notes
    -----
    Thread-safe.
    """

    def __init__(self, submitter: Submitter) -> None:
        self._submitter = submitter
        # A stream that is collected as garbage, on whatever thread, tells so too.
        self._lock = threading.RLock()
        self._taken: dict[Key, int] = {}
        client = submitter.client
        handlers: dict[str, Any] = client._stream_handlers
        handlers[protocol.CHUNKS] = partial(chunks_arrived, client)

    def __repr__(self) -> str:
        return f"<Readings of {self._submitter.client.id!r}: {len(self._taken)} unsent>"

    def tell(self, key: Key, taken: int) -> None:
        """So many chunks of a stream are read; or ``OPEN``, or ``LEFT``."""
        with self._lock:
            is_first = not self._taken
            # One that waits for the whole, or has left, does not read again.
            if taken < 0 or self._taken.get(key, 0) >= 0:
                self._taken[key] = taken
        loop = self._submitter.client.loop
        if is_first and loop is not None:
            loop.add_callback(self._flush)

    def _flush(self) -> None:
        with self._lock:
            taken, self._taken = self._taken, {}
        if not taken:
            return
        message: protocol.ReadMessage = {
            "op": protocol.READ,
            "keys": list(taken),
            "taken": list(taken.values()),
        }
        self._submitter.send(dict(message))


def chunks_arrived(
    client: Client,
    keys: list[Key],
    firsts: list[int],
    counts: list[int],
    nbytes: list[int],
    more: list[bool],
    packs: list[Pack],
) -> None:
    """Keep chunks for those who read them."""
    for i, key in enumerate(keys):
        state = client.futures.get(key)
        if isinstance(state, StreamState):
            state.inbox.arrive(firsts[i], counts[i], nbytes[i], more[i], packs[i])
