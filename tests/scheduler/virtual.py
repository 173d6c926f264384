"""An event loop whose time passes at once."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from scheduler_plugins import (
    dispatcher,
    lifecycle,
    recovery,
    running,
    supervision,
    swapping,
    timer,
    waiting,
)


class _Selector(selectors.SelectSelector):
    """Waits by moving the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            pytest.fail("everybody waits for ever")
        self.now += max(timeout, 0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, with the engine on the loop's own clock."""
    loop = _Loop()
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            dispatcher,
            lifecycle,
            recovery,
            running,
            supervision,
            swapping,
            timer,
            waiting,
        ):
            patch.setattr(module, "monotonic", loop.time)
        try:
            loop.run_until_complete(main)
        finally:
            loop.close()


def on_loop(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Let a test run on the loop's own clock."""

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return wrapped
