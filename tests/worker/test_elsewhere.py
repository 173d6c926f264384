"""Waiting for another process of the host."""

from __future__ import annotations

import asyncio
import errno
import threading

import pytest

from daskinfer.worker.elsewhere import Elsewhere

PATIENCE = 30


class Other:
    """Another process: what it has written, and whether it is at it still."""

    def __init__(self) -> None:
        self.written: float | None = 0.0
        self.gone = threading.Event()
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        assert self.gone.wait(PATIENCE)

    def seen_by(self, patience: float) -> Elsewhere:
        return Elsewhere(self.wait, lambda: self.written, patience)


def test_who_lets_go_is_not_waited_for_any_longer() -> None:
    async def test() -> None:
        other = Other()
        elsewhere = other.seen_by(PATIENCE)
        assert not elsewhere.stands_still()
        waiting = asyncio.ensure_future(elsewhere.lets_go())
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        other.gone.set()
        await asyncio.wait_for(waiting, PATIENCE / 2)
        # Somebody else has begun.
        await asyncio.wait_for(elsewhere.lets_go(), PATIENCE / 2)
        assert other.waits == 2

    asyncio.run(test())


def test_who_writes_is_waited_for_and_who_stands_still_is_not() -> None:
    async def test() -> None:
        other = Other()
        elsewhere = other.seen_by(0.02)
        for written in (1.0, 2.0, None, 3.0):
            other.written = written
            assert not elsewhere.stands_still()
            await asyncio.wait_for(elsewhere.lets_go(), PATIENCE / 2)
        while not elsewhere.stands_still():
            await asyncio.wait_for(elsewhere.lets_go(), PATIENCE / 2)
        # One thread waits, however often that is looked at.
        assert other.waits == 1
        other.gone.set()

    asyncio.run(test())


def test_where_nobody_can_wait_that_is_said() -> None:
    def wait() -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    async def test() -> None:
        with pytest.raises(OSError, match="No locks"):
            await Elsewhere(wait, lambda: 0.0, PATIENCE).lets_go()

    asyncio.run(test())


def test_a_wait_that_is_given_up_ends_with_the_other() -> None:
    async def test() -> None:
        other = Other()
        waiting = asyncio.ensure_future(other.seen_by(PATIENCE).lets_go())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        other.gone.set()
        # Its loop has no failure to tell of, whichever of the two ends first.
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: pytest.fail(str(context))
        )

    asyncio.run(test())
