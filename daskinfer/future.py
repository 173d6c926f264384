"""Dask futures whose small results have come without being asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed import Future
from distributed.client import FutureState

from daskinfer import transport
from daskinfer.failure import copied, origin
from daskinfer.logs import Log
from daskinfer.loss import told_as_lost, until_lost

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Client

    from daskinfer.protocol import Pack

    _Future = Future[Any]
else:
    # Not generic in the older versions of Dask.
    _Future = Future

logger = Log("future")

#: Where a value is not, or not any more.
NOTHING: Any = object()


class Arrived:
    """The values of one pack, unpacked when the first is wanted.

    Parameters
    ----------
    pack
        As it came.
    """

    __slots__ = ("_pack", "_values")

    def __init__(self, pack: Pack) -> None:
        self._pack: Pack | None = pack
        self._values: list[Any] = []

    def take(self, place: int) -> Any:
        """Hand over a value; nobody else gets the same object.

        ``NOTHING`` if what came cannot be unpacked.
        """
        pack, self._pack = self._pack, None
        if pack is not None:
            try:
                self._values = transport.unpack(pack["header"], pack["frames"])
            except Exception as error:
                # One that cannot be unpickled here: all are fetched one by one, and
                # only who asks for that one hears of it.
                logger.info("Could not unpack results: %s", origin(error))
        if not self._values:
            return NOTHING
        value, self._values[place] = self._values[place], NOTHING
        return value


class RequestState(FutureState):
    """A future's state that may hold its result, until that is fetched once.

    Every later fetch goes to the cluster, so that each gives an object of its own,
    as with any Dask future.
    """

    __slots__ = ("_arrived", "_error", "_place")

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self._arrived: Arrived | None = None
        self._place = 0

    @property
    def exception(self) -> Any:
        """Why the request failed, a copy each time.

        The client keeps this state for as long as there is a future of the key. An
        exception that was raised holds a future in its traceback: kept here, neither
        would ever go.
        """
        return copied(self._error)

    @exception.setter
    def exception(self, error: Any) -> None:
        self._error = error

    def arrive(self, arrived: Arrived, place: int) -> None:
        """Keep a result until it is fetched."""
        self._arrived, self._place = arrived, place

    def take(self) -> Any:
        """Hand over the result, or ``NOTHING`` if it is not here."""
        arrived, self._arrived = self._arrived, None
        if arrived is None or self.status != "finished":
            return NOTHING
        return arrived.take(self._place)


class RequestFuture(_Future):
    """A Dask future that needs no round trip for a small result.

    Pickled, it is a plain Dask future.
    """

    async def _result(self, raiseit: bool = True) -> Any:
        assert self._state is not None, "result() has seen to that"
        await self._state.wait()
        value = taken(self)
        if value is not NOTHING:
            return value
        result = super()._result
        if self.status == "finished":
            return await until_lost(self.client, result, raiseit)
        with told_as_lost(self.client):
            return await result(raiseit)  # type: ignore[no-untyped-call]


def taken(future: Future[Any]) -> Any:
    """Take a future's result if it has come already, else ``NOTHING``."""
    state = future._state
    return state.take() if isinstance(state, RequestState) else NOTHING


def request_future(
    key: Key, client: Client, state: type[RequestState] = RequestState
) -> Future[Any]:
    """Make the future of a request that nobody has asked for before.

    Dask makes the state of a future, which this one brings along. Safe from any
    thread, as nobody else knows the key yet.
    """
    client.futures[key] = state(key)
    return RequestFuture(key, client)


def release_all(client: Client, futures: list[Future[Any]]) -> None:
    """Let go of many futures with one message, on the client's event loop.

    As :meth:`distributed.Future.release` does with one message each. Whoever else has a
    future of the same key keeps it.
    """
    unwanted: list[Key] = []
    for future in futures:
        if future._cleared or future._generation != client.generation:
            continue
        future._cleared = True
        with client._refcount_lock:
            client.refcount[future.key] -= 1
            if not client.refcount[future.key]:
                del client.refcount[future.key]
                unwanted.append(future.key)
    for key in unwanted:
        client.futures.pop(key, None)
    if unwanted and client.status != "closed":
        client._send_to_scheduler(
            {"op": "client-releases-keys", "keys": unwanted, "client": client.id}
        )


def results_arrived(
    client: Client, keys: list[Key], places: list[int], pack: Pack
) -> None:
    """Keep results for the futures that wait for them."""
    arrived = Arrived(pack)
    for key, place in zip(keys, places, strict=True):
        state = client.futures.get(key)
        if isinstance(state, RequestState):
            state.arrive(arrived, place)
