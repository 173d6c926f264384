"""Waking who waits for something, be it a thread or a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol


class Signal(Protocol):
    """What is set by one side, and cleared by the other, which waits for it.

    Both do so under one lock. For threads there is :class:`threading.Event`.
    """

    def set(self) -> None:
        """Wake whoever waits; from any thread."""

    def clear(self) -> None:
        """Have the next wait last until it is set again."""


class LoopSignal:
    """A signal for coroutines, set from any thread.

    Parameters
    ----------
    loop
        Where they run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self._is_set = False

    def __repr__(self) -> str:
        return f"<LoopSignal {'set' if self._is_set else 'clear'}>"

    def set(self) -> None:
        """Wake whoever waits, unless that has been said since the last `clear`."""
        if not self._is_set:
            self._is_set = True
            # Where the loop is closed nobody waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Have the next wait last; one that is said to end may do so at once."""
        self._is_set = False
        self._event.clear()

    async def wait(self) -> None:
        """Wait until it is set."""
        await self._event.wait()
