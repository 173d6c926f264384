"""Hearing at once how a future ends, without a coroutine for each.

Dask gives a future's state its event when somebody first waits for it. An event that
reports is put there before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.client import FutureState


class ReportingEvent(asyncio.Event):
    """The event of a future's state, which tells when it is set.

    Parameters
    ----------
    state
        Whose event it is.
    tell
        Called with the state, on the client's event loop, each time that it is
        finished, failed or cancelled.
    """

    def __init__(
        self, state: FutureState, tell: Callable[[FutureState], object]
    ) -> None:
        super().__init__()
        self._state = state
        self._tell = tell

    def set(self) -> None:
        """Wake whoever waits, and tell."""
        super().set()
        self._tell(self._state)


def watch(state: FutureState, tell: Callable[[FutureState], object]) -> bool:
    """Have it told how a future ends; from the client's event loop.

    Returns
    -------
    bool
        False if somebody waits for it already: then it has to be waited for as well.
    """
    if state._event is not None:
        return False
    # Dask types this as None, which it is until somebody waits.
    events: Any = state
    events._event = ReportingEvent(state, tell)
    return True
