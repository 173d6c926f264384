"""Results of many futures, fetched in packs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from dask._task_spec import TaskRef
from distributed import Future
from distributed.utils_comm import pack_data, unpack_remotedata

from daskinfer import transport
from daskinfer.client import current_client
from daskinfer.future import NOTHING, taken
from daskinfer.installation import calls
from daskinfer.loss import told_as_lost, until_lost
from daskinfer.watching import watch

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Client
    from distributed.client import FutureState


def gather(futures: Any, errors: str = "raise", client: Client | None = None) -> Any:
    """Wait for futures and fetch their results, as ``client.gather`` does.

    Small results come packed, many to a buffer, which is about ten times faster
    than one by one. Large ones, and futures that no deployment made, are fetched
    by Dask as ever.

    Parameters
    ----------
    futures
        A future or nested lists, tuples, sets and dicts of futures.
    errors
        ``"raise"`` the first error, or ``"skip"`` failed futures in a list.
    client
        The client that made them; by default the futures' own.

    Returns
    -------
    The same containers with results in them. Awaitable with an asynchronous
    client.

    Raises
    ------
    ValueError
        ``errors`` is neither, or the futures belong to several clients.
    SchedulerLost
        The scheduler is gone.
    """
    if errors not in ("raise", "skip"):
        raise ValueError(f"errors must be 'raise' or 'skip', not {errors!r}")
    if isinstance(futures, Iterator):
        futures = list(futures)
    _, found = unpack_remotedata(futures)
    owners = {future.client for future in found if isinstance(future, Future)}
    if len(owners) > 1:
        raise ValueError(f"the futures belong to {len(owners)} clients; gather each's")
    own = client or (owners.pop() if owners else current_client())
    return own.sync(_gather, own, futures, found, errors)


async def gather_now(client: Client, futures: list[Future[Any]]) -> list[Any]:
    """As :func:`gather`, awaited on the client's own event loop."""
    results: list[Any] = await _gather(client, futures, set(futures), "raise")
    return results


async def _gather(
    client: Client, futures: Any, found: set[TaskRef], errors: str
) -> Any:
    wanted = cast("set[Future[Any]]", found)
    await _wait([f._state for f in wanted if f._state is not None], errors)
    finished = [future for future in wanted if future.status == "finished"]
    if len(finished) < len(found):
        # Dask raises, skips or waits again as its own gather documents.
        with told_as_lost(client):
            return await client._gather(futures, errors=errors)
    values = {
        future.key: value
        for future in finished
        if (value := taken(future)) is not NOTHING
    }
    if len(values) < len(finished):
        absent = [future.key for future in finished if future.key not in values]
        values |= await _fetch(client, absent)
    rest = [future for future in finished if future.key not in values]
    if rest:
        fetched = await until_lost(client, client._gather, rest, errors="raise")
        values.update((f.key, v) for f, v in zip(rest, fetched, strict=True))
    unpacked, _ = unpack_remotedata(futures)
    return pack_data(unpacked, values)


async def _wait(states: list[FutureState], errors: str) -> None:
    """Wait until all are done, or one failed where that is to be raised."""
    latch = _Latch(stop_at_error=errors == "raise")
    waiters = [
        asyncio.create_task(latch.follow(state))
        for state in states
        if state.status == "pending" and not latch.watch(state)
    ]
    try:
        await latch.opened(states)
    finally:
        for waiter in waiters:
            waiter.cancel()


class _Latch:
    """Opens when the last of many futures has ended, or the first has failed."""

    def __init__(self, stop_at_error: bool) -> None:
        self._stop_at_error = stop_at_error
        self._pending: set[FutureState] = set()
        self._open = asyncio.Event()

    def watch(self, state: FutureState) -> bool:
        """Wait for a state; False if somebody does already, and it must be followed."""
        self._pending.add(state)
        return watch(state, self.ended)

    async def follow(self, state: FutureState) -> None:
        await state.wait()
        self.ended(state)

    def ended(self, state: FutureState) -> None:
        self._pending.discard(state)
        failed = state.status in ("error", "cancelled")
        if not self._pending or (failed and self._stop_at_error):
            self._open.set()

    async def opened(self, states: list[FutureState]) -> None:
        for state in states:
            if state.status != "pending":
                self.ended(state)
        if states:
            await self._open.wait()


async def _fetch(client: Client, keys: list[Key]) -> dict[Key, Any]:
    answer = await calls(client).daskinfer_gather(keys=keys)
    return transport.merge(answer["packs"])
