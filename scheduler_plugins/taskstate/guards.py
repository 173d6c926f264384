"""What Dask would do with parked tasks, and should not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


def guard(scheduler: Scheduler, is_request: Callable[[Key], bool]) -> None:
    """Keep Dask's time-outs from misreading parked requests.

    Parameters
    ----------
    scheduler
        The scheduler to be guarded.
    is_request
        Whether a key is a request of ours.
    """
    check = scheduler._check_unrunnable_task_timeouts

    def check_others(*args: Any, **kwargs: Any) -> Any:
        # `no-workers-timeout` would fail requests that wait for their batch.
        with parked_hidden(scheduler, is_request):
            return check(*args, **kwargs)

    scheduler._check_unrunnable_task_timeouts = check_others  # type: ignore[method-assign]


@contextlib.contextmanager
def parked_hidden(
    scheduler: Scheduler, is_request: Callable[[Key], bool]
) -> Iterator[None]:
    """Let Dask look at its state as if there were no parked requests."""
    unrunnable = scheduler.unrunnable
    requests = {ts: since for ts, since in unrunnable.items() if is_request(ts.key)}
    for ts in requests:
        del unrunnable[ts]
    try:
        yield
    finally:
        unrunnable.update(
            (ts, since) for ts, since in requests.items() if ts.state == "no-worker"
        )
