"""What is said when the scheduler is gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from distributed.client import FutureCancelledError, FuturesCancelledError, FutureState
from distributed.comm.core import CommClosedError

from daskinfer.exceptions import SchedulerLost

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")

#: Among a client's extensions: the id of the scheduler that it has spoken to.
SCHEDULER = "daskinfer-scheduler"

#: Dask's reason for cancelling futures whose scheduler is gone.
_REASON = "scheduler-connection-lost"
_CLOSED = ("closing", "closed")
_numbers = itertools.count()


def is_lost(client: Client) -> bool:
    """Whether a client that was connected knows that its scheduler is gone.

    It tries to connect again for as long as its own ``timeout``, and closes then.
    """
    # One that is connecting for the first time, in another thread, has lost nothing.
    was_connected = client._handle_report_task is not None
    return was_connected and client.scheduler_comm is None


def scheduler_lost() -> SchedulerLost:
    """What to raise."""
    return SchedulerLost(
        "the connection to the scheduler is lost, and what was not answered yet "
        "with it: connect again, deploy again if the scheduler is a new one, and "
        "send it again"
    )


@contextlib.contextmanager
def told_as_lost(client: Client) -> Iterator[None]:
    """Turn what Dask raises when its scheduler is gone into `SchedulerLost`.

    A scheduler that is closed on purpose closes its clients.
    """
    try:
        yield
    except FutureCancelledError as error:
        if not (error.reason == _REASON or client.status in _CLOSED):
            raise
        raise scheduler_lost() from error
    except FuturesCancelledError as error:
        lost = any(group.reason == _REASON for group in error.error_groups)
        if not (lost or client.status in _CLOSED):
            raise
        raise scheduler_lost() from error


async def until_lost(
    client: Client,
    ask: Callable[..., Awaitable[T]],
    /,
    *args: Any,
    **kwargs: Any,
) -> T:
    """Ask the scheduler something, and wait for as long as there is one.

    Dask would try to connect for as long as the client's ``timeout``.

    Raises
    ------
    SchedulerLost
        As soon as the client knows.
    """
    if is_lost(client):
        raise scheduler_lost()
    # Dask cancels the states of all futures when it loses its scheduler.
    key = f"daskinfer-connection-{next(_numbers)}"
    client.futures[key] = connection = FutureState(key)
    answer = asyncio.ensure_future(ask(*args, **kwargs))
    loss = asyncio.ensure_future(connection.wait())
    try:
        await asyncio.wait((answer, loss), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and is_lost(client):
            raise scheduler_lost()
        with told_as_lost(client):
            return await answer
    except CommClosedError as error:
        raise scheduler_lost() from error
    except OSError as error:
        # A model may raise one too, and time out.
        if isinstance(error, TimeoutError | SchedulerLost) or not is_lost(client):
            raise
        raise scheduler_lost() from error
    finally:
        client.futures.pop(key, None)
        loss.cancel()
        answer.cancel()


class Calls:
    """The scheduler's calls, as methods to await.

    Parameters
    ----------
    client
        Whose scheduler it is.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<Calls of {self._client.id}>"

    def __getattr__(self, name: str) -> Any:
        async def call(**arguments: Any) -> Any:
            return await getattr(self._client.scheduler, name)(**arguments)

        return partial(until_lost, self._client, call)
