"""Requests on their way: hears how each ends, on the client's event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from distributed.client import FutureState
from distributed.core import clean_exception

from daskinfer.exceptions import Overloaded
from daskinfer.future import NOTHING, release_all, taken
from daskinfer.gather import gather_now
from daskinfer.imap.window import Outcome
from daskinfer.loss import told_as_lost
from daskinfer.watching import watch

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Client, Future

_numbers = itertools.count()

#: Seconds.
_QUIET = 1.0


class Requests:
    """Requests by number; those that end together are told of together.

    Parameters
    ----------
    client
        Whose futures they are.
    settle
        Called with the outcomes of requests, and with those of requests that were
        turned away because the deployment's queue is full.
    fail
        Called with an error after which no request will end as it should: the
        scheduler is gone, or the client was closed.

    Notes
    -----
    :meth:`add` is thread-safe; all else happens on the client's event loop.

    Attributes
    ----------
    hold
        How many requests that have ended may be there still. None are if nothing ends
        for a second, nor are those with large results.
    """

    def __init__(
        self,
        client: Client,
        settle: Callable[[list[Outcome], list[Outcome]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._client = client
        self._settle = settle
        self._fail = fail
        self.hold = 0
        self._held: deque[Future[Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._requests: dict[Key, tuple[int, Future[Any]]] = {}
        self._fresh: list[Future[Any]] = []
        self._ended: list[FutureState] = []
        self._fetched: set[Key] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection: FutureState | None = None

    def __repr__(self) -> str:
        return f"<Requests on their way: {len(self._requests)}>"

    def add(self, place: int, future: Future[Any]) -> None:
        """Hear how a request ends that was just sent, even if it has ended already."""
        with self._lock:
            self._requests[future.key] = place, future
            self._fresh.append(future)
            is_first = len(self._fresh) == 1
        if is_first:
            self.on_loop(self._watch)

    def on_loop(self, function: Callable[[], object]) -> None:
        """Call a function on the client's event loop, soon."""
        loop = self._client.loop
        assert loop is not None, "the client has been started"
        loop.add_callback(function)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Let a coroutine run until all is cancelled, at the longest."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def watch_connection(self) -> None:
        """Hear when nothing sent will be answered any more.

        Dask cancels all futures that it knows when it loses its scheduler, is closed or
        restarted. Of what is sent after that it says nothing.
        """
        key = f"daskinfer-imap-{next(_numbers)}"
        self._connection = self._client.futures[key] = FutureState(key)
        watch(self._connection, self._disconnected)

    def cancel(self) -> None:
        """Cancel all that is on its way, and the coroutines that were spawned."""
        for task in list(self._tasks):
            task.cancel()
        if self._connection is not None:
            self._client.futures.pop(self._connection.key, None)
        with self._lock:
            futures = [future for _, future in self._requests.values()]
            self._requests.clear()
        release_all(self._client, futures)
        self._release(hold=0)

    def _watch(self) -> None:
        with self._lock:
            fresh, self._fresh = self._fresh, []
        for future in fresh:
            state = future._state
            assert state is not None, "a future that was sent has one"
            if state.status != "pending":
                self._tell(state)
            elif not watch(state, self._tell):
                self.spawn(self._follow(state))

    async def _follow(self, state: FutureState) -> None:
        await state.wait()
        self._tell(state)

    def _tell(self, state: FutureState) -> None:
        # Also of those that were let go of, which Dask cancels then.
        if state.key in self._requests:
            self._ended.append(state)
            if len(self._ended) == 1:
                self.on_loop(self._collect)

    def _collect(self) -> None:
        """See what became of all requests that have ended by now."""
        ended, self._ended = self._ended, []
        outcomes: dict[Key, Outcome] = {}
        refused: dict[Key, Outcome] = {}
        absent: dict[Key, tuple[int, Future[Any]]] = {}
        for state in ended:
            key, status = state.key, state.status
            request = self._requests.get(key)
            if request is None or key in self._fetched:
                continue
            place, future = request
            if status == "finished":
                value = taken(future)
                if value is not NOTHING:
                    outcomes[key] = Outcome(place, value)
                elif key not in outcomes:
                    absent[key] = request
            elif status == "error":
                error = _error_of(state)
                group = refused if isinstance(error, Overloaded) else outcomes
                group[key] = Outcome(place, None, error)
            elif status == "cancelled":
                self._disconnected(state)
        if absent:
            self._fetched.update(absent)
            self.spawn(self._fetch(absent))
        self._held += self._end([*outcomes, *refused])
        self._release(self.hold)
        self._settle(list(outcomes.values()), list(refused.values()))

    async def _fetch(self, absent: dict[Key, tuple[int, Future[Any]]]) -> None:
        """Fetch results that were too large to come unasked."""
        requests = list(absent.values())
        try:
            values = await gather_now(self._client, [future for _, future in requests])
        except Exception:
            # One of them is lost for good, or cannot be unpickled here.
            outcomes = [await _outcome(place, future) for place, future in requests]
        else:
            outcomes = [
                Outcome(place, value)
                for (place, _), value in zip(requests, values, strict=True)
            ]
        self._fetched.difference_update(absent)
        release_all(self._client, self._end(list(absent)))
        self._settle(outcomes, [])

    def _end(self, keys: list[Key]) -> list[Future[Any]]:
        with self._lock:
            return [self._requests.pop(key)[1] for key in keys]

    def _release(self, hold: int) -> None:
        """Let go of the oldest that have ended, and of the others when it is quiet."""
        held = self._held
        count = max(len(held) - hold, 0)
        release_all(self._client, [held.popleft() for _ in range(count)])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if held:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_QUIET, self._release, 0)

    def _disconnected(self, state: FutureState) -> None:
        error: BaseException | None = state.exception
        assert error is not None, "it was cancelled"
        try:
            with told_as_lost(self._client):
                raise error
        except Exception as told:
            self._fail(told.with_traceback(None))


def _error_of(state: FutureState) -> BaseException:
    """Why a request failed, as its future would raise it."""
    _, error, traceback = clean_exception(state.exception, state.traceback)
    assert error is not None, "it failed"
    return error.with_traceback(traceback)


async def _outcome(place: int, future: Future[Any]) -> Outcome:
    try:
        return Outcome(place, await future._result())
    except Exception as error:
        return Outcome(place, None, error.with_traceback(None))
