"""Which of the streams on a device runs its next steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from distributed.metrics import monotonic

#: Seconds after which whoever has waited the longest is next.
_PATIENCE = 0.1


@dataclass(slots=True, eq=False)
class Share:
    """What one stream, or one batch of streams, has had of the device.

    ``used`` are seconds; since ``waits_since`` it wants more.
    """

    used: float = 0.0
    waits_since: float = 0.0


def choose(waiting: list[Share], now: float) -> Share:
    """Who is next: whoever has used the least.

    So the short never wait for the long. Nobody waits for ever: one that has waited too
    long goes first.

    Examples
    --------
    >>> long, short = Share(used=5.0, waits_since=1.0), Share(used=0.1, waits_since=1.0)
    >>> choose([long, short], now=1.05) is short, choose([long, short], now=2.0) is long
    (True, True)
    """
    longest = min(waiting, key=lambda share: share.waits_since)
    if now - longest.waits_since >= _PATIENCE:
        return longest
    return min(waiting, key=lambda share: share.used)


class Turns:
    """Lets streams have the device one after the other, a few steps each.

    Notes
    -----
    Lives on the worker's event loop. At most one of them is in the queue before the
    device, so that batches of other models come between.
    """

    def __init__(self) -> None:
        self._waiting: dict[Share, asyncio.Future[None]] = {}
        self._is_taken = False

    def __repr__(self) -> str:
        return f"<Turns waiting: {len(self._waiting)}>"

    @contextlib.asynccontextmanager
    async def turn(self, share: Share) -> AsyncIterator[None]:
        """Wait for the next turn, and have it."""
        if self._is_taken or self._waiting:
            share.waits_since = monotonic()
            self._waiting[share] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[share]
            except asyncio.CancelledError:
                if self._waiting.pop(share, None) is None:
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._is_taken = bool(self._waiting)
        if self._waiting:
            chosen = choose(list(self._waiting), monotonic())
            self._waiting.pop(chosen).set_result(None)
