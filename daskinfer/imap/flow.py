"""Sends inputs while there is room for them, and holds results until they are taken."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any

from dask.sizeof import sizeof

from daskinfer import config, payload
from daskinfer.failure import describe
from daskinfer.imap.following import follow
from daskinfer.imap.pace import Backoff, Capacity, Inputs, bounds, held
from daskinfer.imap.requests import Requests
from daskinfer.imap.window import Outcome, Unreadable, Window
from daskinfer.logs import Log
from daskinfer.loss import scheduler_lost
from daskinfer.submission import submitter

if TYPE_CHECKING:
    from distributed import Client, Future

    from daskinfer.handle import Model
    from daskinfer.imap.signals import Signal
    from daskinfer.options import CallOptions

logger = Log("imap")

#: Of so many inputs, and results, one is measured.
_SAMPLE = 32


class Flow:
    """Inputs on the one side, results on the other, and few requests between them.

    Parameters
    ----------
    client, model, options, kwargs
        What is called, how, and the keywords that go to the model.
    ordered
        Whether results are taken in the order of the inputs.
    given
        How many requests there may be; None: as many as keep the devices busy.
    results
        Set when there may be a result to take.
    room
        Set when there may be room for another input.

    Notes
    -----
    Thread-safe. One thread or coroutine reads inputs: it asks for :meth:`room`, and
    calls :meth:`send` and :meth:`end`. Others :meth:`take`. Whatever else happens does
    so on the client's event loop. Who has started a flow has to :meth:`close` it.
    """

    def __init__(
        self,
        client: Client,
        model: Model,
        options: CallOptions,
        kwargs: dict[str, Any],
        *,
        ordered: bool,
        given: int | None,
        results: Signal,
        room: Signal,
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._kwargs = kwargs
        self._given = given
        self._results = results
        self._room = room
        self._batches = config.integer("imap.in-flight")
        self._memory = config.nbytes("imap.memory")
        self._inline = config.nbytes("imap.inline-limit")
        self._window = Window(ordered)
        self._requests = Requests(client, self._settle, self._fail)
        self._inputs = Inputs()
        self._capacity: Capacity | None = None
        self._backoff = Backoff()
        self._sends_again = self._was_refused = False
        #: Inputs by place, where they may have to be sent again.
        self._kept: dict[int, Any] = {}
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._reader_waits = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Flow to {self._model!r} {self._window!r}>"

    @property
    def taken(self) -> int:
        """How many results were taken."""
        return self._window.taken

    def start(self) -> None:
        """Find out how much may be sent; until then there is no room."""
        if self._client.status in ("closing", "closed"):
            # Its event loop may be gone as well.
            self._fail(scheduler_lost())
        else:
            self._requests.on_loop(self._begin)

    # Whoever reads

    def room(self) -> int | None:
        """How many more inputs may be sent now; None: no more are wanted.

        If it is 0, wait for the signal.
        """
        with self._lock:
            if self._is_closed:
                return None
            room = self._window.room
            if not room:
                self._reader_waits = True
                self._room.clear()
            # How many there may be is known better after each that is measured.
            since = self._window.sent % _SAMPLE
            return min(room, _SAMPLE - since if since else 1)

    def send(self, value: Any) -> bool:
        """Send one input for which there is room; False if no more are wanted."""
        future, failure = None, None
        if isinstance(value, Unreadable):
            failure = value.error
        else:
            try:
                if self._window.sent % _SAMPLE == 0:
                    self._sample(value)
                future = self._submit(value)
            except Exception as error:
                failure = error
        with self._lock:
            if self._is_closed:
                return False
            place = self._window.send()
            if future is None:
                self._window.answered(Outcome(place, None, failure))
                self._results.set()
            else:
                if self._may_be_refused:
                    self._kept[place] = value
                self._requests.add(place, future)
        return True

    def end(self, error: BaseException | None = None) -> None:
        """There are no more inputs, because reading them failed or not."""
        with self._lock:
            self._window.end(error)
            self._results.set()

    # Whoever takes

    def take(self) -> Outcome | None:
        """The result that is due next, if it is here.

        If not, and it was not over before, wait for the signal.
        """
        with self._lock:
            outcome = self._window.take()
            if outcome is not None:
                self._wake_reader()
            elif not self.is_over:
                self._results.clear()
            return outcome

    @property
    def is_over(self) -> bool:
        """Whether no more results will come, once :meth:`take` gives none."""
        return self._is_closed or self._window.is_over

    @property
    def error(self) -> BaseException | None:
        """Why there are no more, if it was not the end of the inputs."""
        return self._window.error

    def close(self) -> None:
        """Cancel what is on its way; does not wait for that."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._results.set()
            self._room.set()
        self._requests.on_loop(self._cancel)

    def abandon(self) -> None:
        """Close it soon. Takes no lock, so that the garbage collector may do it."""
        self._requests.on_loop(self.close)

    # On the client's event loop

    def _begin(self) -> None:
        if not self._is_closed:
            self._requests.watch_connection()
            self._requests.spawn(self._follow())

    def _cancel(self) -> None:
        self._kept.clear()
        self._requests.cancel()

    async def _follow(self) -> None:
        try:
            once = self._given is not None
            async for capacity in follow(self._client, self._model, once):
                with self._lock:
                    self._capacity = capacity
                    self._set_bounds()
                    self._wake_reader()
        except Exception as error:
            if self._capacity is None:
                self._fail(error)
            else:
                # If that is the end of it, requests fail, and tell in their turn.
                logger.info(
                    "Could not look at %r: %s",
                    *(self._model.name, describe(error)),
                    deployment=self._model.name,
                )

    def _settle(self, outcomes: list[Outcome], refused: list[Outcome]) -> None:
        again = [outcome.place for outcome in refused if outcome.place in self._kept]
        if len(again) < len(refused):
            # A limit that was not there when they were sent.
            outcomes += [o for o in refused if o.place not in self._kept]
        with self._lock:
            if self._is_closed:
                return
            for outcome in outcomes:
                if outcome.place % _SAMPLE == 0 and outcome.error is None:
                    self._inputs.answered(sizeof(outcome.value))
                    self._set_bounds()
                self._window.answered(outcome)
                self._kept.pop(outcome.place, None)
            for place in again:
                self._window.refused(place)
            self._results.set()
            self._wake_reader()
        if again:
            self._was_refused = True
            if not self._sends_again:
                self._sends_again = True
                self._requests.spawn(self._send_again())

    async def _send_again(self) -> None:
        """Send what was turned away, until none of it is."""
        while True:
            await asyncio.sleep(self._backoff.seconds)
            self._backoff.tried(self._was_refused)
            self._was_refused = False
            with self._lock:
                if not self._window.has_refused:
                    break
                places = self._window.again(self._backoff.count)
                self._wake_reader()
            for place in places:
                self._repeat(place)
        self._sends_again = False

    def _repeat(self, place: int) -> None:
        try:
            # The loop's own context has no annotations of the user's.
            future = self._context.copy().run(self._submit, self._kept[place])
        except Exception as error:
            self._settle([Outcome(place, None, error)], [])
        else:
            self._requests.add(place, future)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._window.fail(error)
            self._results.set()

    # Anywhere

    @property
    def _may_be_refused(self) -> bool:
        return self._capacity is not None and self._capacity.max_queue is not None

    def _submit(self, value: Any) -> Future[Any]:
        return submitter(self._client).submit(
            self._model, self._options, (value,), self._kwargs, self._inline
        )

    def _sample(self, value: Any) -> None:
        measure = payload.measure((value,), self._kwargs, self._model.batch_dim)
        nbytes = sizeof(value)
        with self._lock:
            self._inputs.seen(measure.rows, nbytes)
            self._set_bounds()

    def _set_bounds(self) -> None:
        if self._capacity is not None:
            self._window.bounds = bounds(
                self._given, self._capacity, self._inputs, self._batches, self._memory
            )
            self._requests.hold = held(self._given, self._inputs, self._memory)

    def _wake_reader(self) -> None:
        if self._reader_waits and self._window.is_low:
            self._reader_waits = False
            self._room.set()
