"""The fast path of submitting: many requests in one message.

``Client.submit`` sends a graph for every call, which the scheduler unpickles,
orders and annotates: milliseconds. A :class:`Submitter` collects what is
submitted until the client's event loop gets to run, and sends all of it as one
:data:`~daskinfer.protocol.SUBMIT` message for each handle and set of options.
The futures are Dask's own.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from dask._task_spec import TaskRef
from dask.base import get_annotations
from distributed import Future
from distributed.metrics import monotonic
from distributed.protocol.serialize import to_serialize
from distributed.utils_comm import pack_data, unpack_remotedata

from daskinfer import config, payload, protocol, transport
from daskinfer.future import request_future, results_arrived
from daskinfer.installation import install, is_installed
from daskinfer.options import CallOptions, stream_order
from daskinfer.reading import Readings, StreamState
from daskinfer.stream import Stream
from daskinfer.streams import tune

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Client

    from daskinfer.handle import Model

_EXTENSION = "daskinfer"
_CONTAINERS = (list, tuple, dict, set, frozenset)

#: What leaves together.
_Parcel: TypeAlias = (
    "dict[tuple[Model, CallOptions, int, bool], protocol.SubmitMessage]"
)


def submitter(client: Client) -> Submitter:
    """Return the client's one submitter, made at first use."""
    found: Submitter | None = client.extensions.get(_EXTENSION)
    if found is None:
        found = client.extensions.setdefault(_EXTENSION, Submitter(client))
    return found


class Submitter:
    """Collects requests of one client and sends them together.

    Parameters
    ----------
    client
        Whose scheduler and event loop to use.

    Notes
    -----
    Thread-safe. Requests leave after whatever the same thread has sent before that
    makes their inputs, and ahead of whatever it does afterwards with the futures it
    got.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._interval = config.seconds("send-interval") or 0.0
        self._inline_limit = config.nbytes("client.inline-limit")
        self._inline = config.nbytes("gather.inline-limit")
        # 20 + 12 hex digits look like one token to Dask, which then groups all
        # requests of a deployment under the deployment's name.
        self._token = uuid.uuid4().hex[:20]
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._parcels: deque[_Parcel] = deque()
        self._held: list[_Parcel] = []
        self._later: list[dict[str, Any]] = []
        self._installing: asyncio.Future[None] | None = None
        handlers: dict[str, Any] = client._stream_handlers
        handlers[protocol.ANSWERS] = partial(results_arrived, client)
        handlers[protocol.REST] = self._let_rest
        self._resting: dict[str, float] = {}
        self.readings = Readings(self)

    def __repr__(self) -> str:
        waiting = sum(len(m["keys"]) for p in self._parcels for m in p.values())
        return f"<Submitter of {self.client.id!r} unsent: {waiting}>"

    def submit(
        self,
        model: Model,
        options: CallOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inline: int | None = None,
        order: protocol.StreamOrder | None = None,
    ) -> Future[Any]:
        """Queue one request for sending and return its future.

        Its result comes unasked if it has no more than ``inline`` bytes, together
        with those of its batch; by default as configured. With an ``order`` it is
        answered piece by piece.

        Raises
        ------
        Exception
            Whatever measuring or pickling the inputs raises: the request is not
            sent then.
        """
        if not (is_installed(self.client) or self.client.asynchronous):
            self.client.sync(install, self.client)
        key: Key = (
            f"{model.__name__}-{self._token}{next(self._count):012x}"
            if options.key is None
            else options.key
        )
        make: Any = request_future if options.key is None else Future
        if order is not None and order["read"]:
            make = partial(request_future, state=StreamState)
        annotations = get_annotations()
        if annotations:
            options = options.within(annotations, key)
        args, kwargs, dependencies = _extract_futures(args, kwargs)
        if dependencies:
            signature, rows = None, 1
        else:
            measure = payload.measure(args, kwargs, model.batch_dim)
            signature, rows = measure.signature or f"alone-{key}", measure.rows
            if order is not None and not order["keep"]:
                # What its reader does not take shall be nowhere, and hold up nobody.
                signature = f"alone-{key}"
        content = None
        if model.cached and not dependencies and not self._rests(model.name):
            content = _content(args, kwargs)
        frames = transport.dumps((args, kwargs))
        if content is not None:
            # What is sent later has to be what was hashed: others are given the result.
            frames = [bytes(frame) for frame in frames]
        body = self._payload(frames)
        future: Future[Any] = make(key, self.client)
        with self._lock:
            # What makes an unfinished input may stand behind the open parcel in the
            # client's event loop.
            if not self._parcels or any(self._is_pending(key) for key in dependencies):
                loop = self.client.loop
                assert loop is not None, "the client has been started"
                self._parcels.append({})
                loop.add_callback(self._flush)
            parcel = self._parcels[-1]
            inline = self._inline if inline is None else inline
            alike = model, options, inline, order is not None and order["read"]
            message = parcel.get(alike)
            if message is None:
                message = parcel[alike] = _message(model, options, inline, order)
            if dependencies:
                message["dependencies"][len(message["keys"])] = dependencies
            if content is not None:
                message["contents"][len(message["keys"])] = content
            message["keys"].append(key)
            message["payloads"].append(body)
            message["signatures"].append(signature)
            message["rows"].append(rows)
        return future

    def stream(
        self,
        model: Model,
        options: CallOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Stream:
        """Queue one request for sending and return the stream of its chunks.

        Raises
        ------
        ValueError
            With ``key=``.
        Exception
            As :meth:`submit`.
        """
        if options.key is not None:
            raise ValueError("key= names a result that many may share; use submit")
        order = stream_order(options, read=True)
        assert order is not None
        future = self.submit(model, options, args, kwargs, order=order)
        return Stream(future, order, self.readings)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message behind all requests (on the client's event loop)."""
        if self._held:
            self._later.append(message)
        else:
            self.client._send_to_scheduler_safe(message)

    def _let_rest(self, name: str, seconds: float) -> None:
        self._resting[name] = monotonic() + seconds

    def _rests(self, name: str) -> bool:
        """Whether hits are so rare that the scheduler does not ask for contents."""
        until = self._resting.get(name)
        return until is not None and monotonic() < until

    def _payload(self, frames: list[Any]) -> protocol.Payload:
        if len(frames) == 1 and len(frames[0]) <= self._inline_limit:
            return bytes(frames[0])
        return [to_serialize(frame) for frame in frames]

    def _is_pending(self, key: Key) -> bool:
        state = self.client.futures.get(key)
        return state is not None and state.status == "pending"

    def _flush(self) -> None:
        with self._lock:
            parcel = self._parcels.popleft()
        if is_installed(self.client):
            self._send(parcel)
            return
        # Nobody can be made to wait on an event loop: the requests wait instead.
        self._held.append(parcel)
        if len(self._held) == 1:
            self._installing = asyncio.ensure_future(self._install_and_send())

    async def _install_and_send(self) -> None:
        try:
            await install(self.client)
        except Exception as error:
            for parcel in self._held:
                self._fail(parcel, error)
        else:
            for parcel in self._held:
                self._send(parcel)
            for message in self._later:
                self.client._send_to_scheduler_safe(message)
        finally:
            self._held.clear()
            self._later.clear()

    def _fail(self, parcel: _Parcel, error: Exception) -> None:
        for message in parcel.values():
            for key in message["keys"]:
                state = self.client.futures.get(key)
                if state is not None:
                    state.set_error(error, None)

    def _send(self, parcel: _Parcel) -> None:
        stream = self.client.scheduler_comm
        # A reconnect makes a new stream, with Dask's own interval again.
        if stream is not None and stream.interval != self._interval:
            tune(stream, self._interval)
        for message in parcel.values():
            self.client._send_to_scheduler_safe(message)


def _message(
    model: Model,
    options: CallOptions,
    inline: int,
    order: protocol.StreamOrder | None,
) -> protocol.SubmitMessage:
    return {
        "op": protocol.SUBMIT,
        "name": model.name,
        "version": model.version,
        "keys": [],
        "payloads": [],
        "signatures": [],
        "rows": [],
        "dependencies": {},
        "priority": options.priority,
        "retries": options.retries,
        "workers": None if options.workers is None else list(options.workers),
        "allow_other_workers": options.allow_other_workers,
        "resources": None if options.resources is None else dict(options.resources),
        "inline": inline,
        "timeout": options.timeout,
        "contents": {},
        "stream": order,
    }


def _content(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    try:
        return payload.content_of(args, kwargs)
    except payload.NoContentError:
        return None


def _extract_futures(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Key]]:
    """Replace futures by references that a worker resolves."""
    if not any(
        isinstance(value, (TaskRef, *_CONTAINERS))
        for value in itertools.chain(args, kwargs.values())
    ):
        return args, kwargs, []
    (bare_args, bare_kwargs), found = unpack_remotedata((args, kwargs))
    if not found:
        return args, kwargs, []
    # `unpack_remotedata` leaves bare keys, which a plain string input could equal;
    # references cannot be mistaken for data.
    references = {ref.key: TaskRef(ref.key) for ref in found}
    args, kwargs = pack_data((bare_args, bare_kwargs), references)
    return args, kwargs, list(references)
