"""Weights that another process of this host fetches: they are waited for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from distributed.metrics import monotonic


class Elsewhere:
    """Waits for another process, as long as that gets on.

    Parameters
    ----------
    wait
        Blocks as long as another process is at it; called in a thread of its own.
    last_written
        When that has last written, in any unit; None if it has not begun.
    patience
        Seconds without writing after which it is not waited for any more. That is
        noticed when twice as much has passed, at the latest.

    Notes
    -----
    Lives on the worker's event loop. A thread that has begun to wait cannot be
    interrupted: it ends when the other process lets go, or dies.
    """

    def __init__(
        self,
        wait: Callable[[], None],
        last_written: Callable[[], float | None],
        patience: float,
    ) -> None:
        self._wait = wait
        self._last_written = last_written
        self._patience = patience
        self._seen: float | None = None
        self._since = monotonic()
        self._waiting: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Elsewhere last written: {self._seen} patience: {self._patience:g} s>"

    def stands_still(self) -> bool:
        """Whether it has not written for too long, though it has begun."""
        written, now = self._last_written(), monotonic()
        if written is None or written != self._seen:
            self._seen, self._since = written, now
        return now - self._since >= self._patience

    async def lets_go(self) -> None:
        """Wait until it may be whole or free, or else stands still.

        Raises
        ------
        OSError
            If this file system does not let anybody wait.
        """
        if self._waiting is None:
            self._waiting = _in_own_thread(self._wait)
        left = max(self._since + self._patience - monotonic(), 0.0)
        await asyncio.wait({self._waiting}, timeout=left)
        if self._waiting.done():
            waited, self._waiting = self._waiting, None
            waited.result()


def _in_own_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Run a function in a thread that nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def run() -> None:
        error = None
        try:
            function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=run, name="daskinfer-elsewhere", daemon=True).start()
    return future
