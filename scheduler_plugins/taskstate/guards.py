"""What Dask would do with parked tasks, and should not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


def guard(
    scheduler: Scheduler, is_request: Callable[[Key], bool], wanted: Callable[[], int]
) -> None:
    """Keep Dask's time-outs and autoscaling from misreading parked requests.

    Parameters
    ----------
    scheduler
        The scheduler to be guarded.
    is_request
        Whether a key is a request of ours.
    wanted
        How many workers the waiting requests justify.
    """
    s = scheduler
    check = s._check_unrunnable_task_timeouts
    target = s.handlers["adaptive_target"]

    @contextlib.contextmanager
    def hidden() -> Iterator[None]:
        requests = {
            ts: since for ts, since in s.unrunnable.items() if is_request(ts.key)
        }
        for ts in requests:
            del s.unrunnable[ts]
        try:
            yield
        finally:
            s.unrunnable.update(
                (ts, since) for ts, since in requests.items() if ts.state == "no-worker"
            )

    def check_others(*args: Any, **kwargs: Any) -> Any:
        # `no-workers-timeout` would fail requests that wait for their batch.
        with hidden():
            return check(*args, **kwargs)

    def adaptive_target(*args: Any, **kwargs: Any) -> int:
        # Dask takes each parked request for half a second of work.
        with hidden():
            own: int = target(*args, **kwargs)
        return max(own, wanted())

    s._check_unrunnable_task_timeouts = check_others  # type: ignore[method-assign]
    s.handlers["adaptive_target"] = adaptive_target
