"""Weights on their way to a worker, chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from daskinfer import protocol
from daskinfer.exceptions import InferenceError
from daskinfer.failure import describe

if TYPE_CHECKING:
    from daskinfer.artifact.partial import Partial


#: Failures of the scheduler itself after which a download is given up.
_ORIGIN_TRIES = 5


class Download:
    """Fetches the chunks that it is told to, from where it is told to.

    Parameters
    ----------
    gathered
        Where they are put.
    fetch
        Gets bytes from a source: ``await fetch(source, key, start, nbytes)``.
    send
        Sends a message to the scheduler.
    in_thread
        Runs a function to its end: ``await in_thread(function, *args)``.
    timeout
        Seconds that a chunk may be on its way.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(
        self,
        gathered: Partial,
        fetch: Callable[[str, str, int, int], Awaitable[memoryview]],
        send: Callable[[dict[str, Any]], None],
        in_thread: Callable[..., Awaitable[Any]],
        timeout: float,
    ) -> None:
        self.gathered = gathered
        self._fetch = fetch
        self._send = send
        self._in_thread = in_thread
        self._timeout = timeout
        self._transfers: dict[int, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._origin_failures = 0

    def __repr__(self) -> str:
        return f"<Download of {self.gathered!r} on their way: {len(self._transfers)}>"

    async def run(self) -> None:
        """Ask for what is missing, and wait until it is there.

        Raises
        ------
        OSError
            If a chunk could not be kept.
        InferenceError
            If the scheduler itself fails to send a chunk, again and again.
        """
        gathered = self.gathered
        mask = sum(1 << chunk for chunk in gathered.whole)
        message: protocol.WantsMessage = {
            "op": protocol.WANTS,
            "weights": gathered.chunks.key,
            "have": as_bytes(mask),
        }
        self._send(dict(message))
        self._look()
        try:
            await self._ended
        finally:
            pending = list(self._transfers.values())
            for transfer in pending:
                transfer.cancel()
            # What writes to the file in a thread ends by itself.
            await asyncio.gather(*pending, return_exceptions=True)

    def take(self, chunk: int, source: str) -> None:
        """Fetch a chunk from a source, and say how it went."""
        if chunk not in self._transfers and not self._ended.done():
            self._transfers[chunk] = asyncio.create_task(self._take(chunk, source))

    async def _take(self, chunk: int, source: str) -> None:
        try:
            reason = await self._transfer(chunk, source)
        finally:
            del self._transfers[chunk]
        if self._ended.done():
            return
        message: protocol.GotMessage = {
            "op": protocol.NOT_GOT if reason else protocol.GOT,
            "weights": self.gathered.chunks.key,
            "chunk": chunk,
            "source": source,
            "reason": reason,
        }
        self._send(dict(message))
        if reason and not source:
            self._origin_failed(reason)
        self._look()

    async def _transfer(self, chunk: int, source: str) -> str:
        """Get a chunk; return why not, or nothing."""
        chunks = self.gathered.chunks
        start, end = chunks.span(chunk)
        if chunk in self.gathered.whole:
            return ""
        try:
            fetching = self._fetch(source, chunks.key, start, end - start)
            data = await asyncio.wait_for(fetching, self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return f"it did not come within {self._timeout:g} s"
        except Exception as error:
            return describe(error)
        try:
            whole = await self._in_thread(self.gathered.write, chunk, data)
        except OSError as error:
            if not self._ended.done():
                self._ended.set_exception(error)
            return describe(error)
        return "" if whole else "it came damaged"

    def _origin_failed(self, reason: str) -> None:
        self._origin_failures += 1
        if self._origin_failures >= _ORIGIN_TRIES and not self._ended.done():
            self._ended.set_exception(
                InferenceError(
                    f"the weights could not be fetched: the scheduler failed to send "
                    f"chunks {self._origin_failures} times, at last as {reason}"
                )
            )

    def _look(self) -> None:
        complete = len(self.gathered.whole) == len(self.gathered.chunks)
        # One that has just been written in a thread is still to be told of.
        if complete and not self._transfers and not self._ended.done():
            self._ended.set_result(None)


def as_bytes(mask: int) -> bytes:
    r"""Turn a mask of chunks into bytes, the lowest first.

    >>> as_bytes(0b1_00000001)
    b'\x01\x01'
    """
    return mask.to_bytes(-(-mask.bit_length() // 8), "little")


async def to_its_end(running: asyncio.Future[Any]) -> Any:
    """Wait for a thread, even if nobody waits for this any more.

    It must not be left alone with a file that is closed meanwhile.
    """
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
