"""What Dask's ``Adaptive`` asks the scheduler, answered with requests in mind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from dask.typing import Key

from scheduler_plugins.taskstate.guards import parked_hidden

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


class Scaler(Protocol):
    """Who knows what requests are worth."""

    def wanted(self) -> int:
        """How many workers requests need."""

    def closing_to(self, remaining: int | None) -> AbstractContextManager[None]:
        """Meanwhile it is asked which workers may be closed, down to so many."""

    def named(self, addresses: list[str]) -> None:
        """These workers will be closed unless something comes between."""


def answer(
    scheduler: Scheduler, is_request: Callable[[Key], bool], scaler: Scaler
) -> None:
    """Have a scheduler answer for requests what Dask answers for tasks.

    Parameters
    ----------
    scheduler
        The scheduler that is asked.
    is_request
        Whether a key is a request of ours.
    scaler
        Answers for those.

    Notes
    -----
    Dask takes each parked request for half a second of work, and those that are
    running for tasks that could be spread over workers. What it answers without them
    counts for the users' own tasks, and for the results in memory.
    """
    s = scheduler
    own_target, own_closing = s.adaptive_target, s.workers_to_close

    def adaptive_target(*args: Any, **kwargs: Any) -> int:
        # Dask's own answer asks which workers may be closed, which depends on this.
        wanted = scaler.wanted()
        with parked_hidden(s, is_request), running_hidden(s, is_request):
            return max(own_target(*args, **kwargs), wanted)

    def workers_to_close(*args: Any, **kwargs: Any) -> list[Any]:
        target, count = kwargs.get("target"), kwargs.get("n")
        if count is not None:
            target = len(s.workers) - max(count, 0)
        with scaler.closing_to(target):
            found: list[Any] = own_closing(*args, **kwargs)
        return found

    def asked_from_outside(*args: Any, **kwargs: Any) -> list[Any]:
        found = workers_to_close(*args, **kwargs)
        attribute = kwargs.get("attribute", "address")
        names = set(found)
        scaler.named(
            [ws.address for ws in s.workers.values() if getattr(ws, attribute) in names]
        )
        return found

    # Dask's HTTP routes and metrics call the methods, clusters the handlers.
    s.adaptive_target = adaptive_target  # type: ignore[method-assign]
    s.workers_to_close = workers_to_close  # type: ignore[method-assign]
    s.handlers["adaptive_target"] = adaptive_target
    s.handlers["workers_to_close"] = asked_from_outside


@contextlib.contextmanager
def running_hidden(
    scheduler: Scheduler, is_request: Callable[[Key], bool]
) -> Iterator[None]:
    """Let Dask look at its state as if no requests were running."""
    hidden = [
        (ws, ts)
        for ws in scheduler.workers.values()
        for ts in ws.long_running
        if is_request(ts.key)
    ]
    for ws, ts in hidden:
        ws.processing.discard(ts)
    try:
        yield
    finally:
        for ws, ts in hidden:
            ws.processing.add(ts)
