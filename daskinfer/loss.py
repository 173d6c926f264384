"""What is said when the scheduler is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from distributed.client import FutureCancelledError, FuturesCancelledError

from daskinfer.exceptions import SchedulerLost

#: Dask's reason for cancelling futures whose scheduler is gone.
_REASON = "scheduler-connection-lost"


@contextlib.contextmanager
def told_as_lost() -> Iterator[None]:
    """Turn what Dask raises when its scheduler is gone into `SchedulerLost`.

    Examples
    --------
    >>> with told_as_lost():
    ...     raise FutureCancelledError("key", "scheduler-connection-lost")
    Traceback (most recent call last):
        ...
    daskinfer.exceptions.SchedulerLost: the connection to the scheduler is lost, and \
what was not answered yet with it: connect again, deploy again if the scheduler is a \
new one, and send it again
    """
    try:
        yield
    except (FutureCancelledError, FuturesCancelledError, OSError) as error:
        if not _is_loss(error):
            raise
        raise SchedulerLost(
            "the connection to the scheduler is lost, and what was not answered yet "
            "with it: connect again, deploy again if the scheduler is a new one, and "
            "send it again"
        ) from error


def _is_loss(error: BaseException) -> bool:
    if isinstance(error, FutureCancelledError):
        return error.reason == _REASON
    if isinstance(error, FuturesCancelledError):
        return any(group.reason == _REASON for group in error.error_groups)
    return not isinstance(error, TimeoutError | SchedulerLost)


class Calls:
    """The scheduler's calls, as methods to await.

    Parameters
    ----------
    scheduler
        Dask's own connection to it.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __repr__(self) -> str:
        return f"<Calls to {self._scheduler!r}>"

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._scheduler, name)

        async def ask(**arguments: Any) -> Any:
            with told_as_lost():
                return await call(**arguments)

        return ask
