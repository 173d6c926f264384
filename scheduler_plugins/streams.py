"""Forwards the chunks of streams to their readers, and takes their ends in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import monotonic, time

from daskinfer import protocol
from daskinfer.exceptions import (
    DeviceError,
    RequestFailed,
    UnknownDeployment,
    WorkerLost,
)
from daskinfer.failure import type_of
from daskinfer.protocol import LEFT, OPEN, PLAIN, STREAM
from scheduler_plugins.live import LiveStream, LiveStreams
from scheduler_plugins.outcomes import cause_of, cause_on_worker

if TYPE_CHECKING:
    from scheduler_plugins.line import Batch
    from scheduler_plugins.recovery import Recovery
    from scheduler_plugins.request import Request
    from scheduler_plugins.taskstate import TaskStates

#: More than anybody sends.
_ENDLESS = 2**62


class Streams:
    """Follows the streams of all workers from their first chunk to their end.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    send
        Sends a message to a worker: ``send(address, message)``.
    recovery
        Gives those another attempt that can go on elsewhere.

    Attributes
    ----------
    live
        Those that are under way.
    """

    def __init__(
        self,
        tasks: TaskStates,
        send: Callable[[str, Any], None],
        recovery: Recovery,
    ) -> None:
        self.live = LiveStreams()
        self._tasks = tasks
        self._send = send
        self._recovery = recovery
        self._unwanted: dict[tuple[str, str], list[Key]] = {}

    def __repr__(self) -> str:
        return f"<Streams {self.live!r}>"

    # They begin

    def begun(
        self, batch: Batch, requests: dict[Key, Request], message: protocol.DoneMessage
    ) -> None:
        """A batch is answered, and some of its requests are from now on."""
        keys = message["streaming"]
        if not keys:
            return
        now, line, address = monotonic(), batch.line, batch.device.name
        if line.kind == PLAIN:
            line.kind = STREAM
        for key in keys:
            request = requests.get(key)
            if request is None or not self._tasks.is_current(
                key, address, batch.run_ids[key]
            ):
                # Run elsewhere by now, or not wanted.
                self.refuse(batch.batch_id, address, [key])
                continue
            stream = LiveStream(
                request,
                batch.batch_id,
                line,
                batch.device,
                batch.run_ids[key],
                now,
                now,
            )
            request.batch = batch.batch_id
            self.live.add(stream)
            order = request.stream
            if order is not None and order["nbytes"] == _ENDLESS:
                # Said since the batch was sent, perhaps, which knows nothing of it.
                count = OPEN if order["read"] else LEFT
                self._tell_read(batch.batch_id, address, [key], [count])

    def refuse(self, batch_id: str, address: str, keys: list[Key]) -> None:
        """Have a worker stop streams that nobody waits for."""
        if keys:
            self._unwanted.setdefault((batch_id, address), []).extend(keys)

    def drop_unwanted(self) -> bool:
        """Tell workers which streams nobody wants any more; whether there were some."""
        found = bool(self._unwanted)
        for (batch_id, address), keys in self._unwanted.items():
            if self._tasks.has_worker(address):
                message: protocol.DropMessage = {
                    "op": protocol.DROP,
                    "batch": batch_id,
                    "keys": keys,
                    "stimulus_id": f"daskinfer-drop-{batch_id}",
                }
                self._send(address, dict(message))
        self._unwanted.clear()
        return found

    # Chunks

    def chunks(self, message: protocol.ChunksMessage, address: str) -> None:
        """Send chunks on to those who read them, each once."""
        now = monotonic()
        forward: dict[str, list[int]] = {}
        for place, key in enumerate(message["keys"]):
            stream = self._found(message["batch"], key, address)
            if stream is None:
                continue
            request = stream.request
            if request.client is None:
                continue
            upto = message["firsts"][place] + message["counts"][place]
            if upto > request.delivered:
                self._count(stream, upto, message["nbytes"][place], now)
            elif message["counts"][place]:
                # It has them already.
                continue
            forward.setdefault(request.client, []).append(place)
        for client, places in forward.items():
            self._tasks.tell(
                client,
                {
                    "op": protocol.CHUNKS,
                    "keys": [message["keys"][i] for i in places],
                    "firsts": [message["firsts"][i] for i in places],
                    "counts": [message["counts"][i] for i in places],
                    "nbytes": [message["nbytes"][i] for i in places],
                    "more": [message["more"][i] for i in places],
                    "packs": [message["packs"][i] for i in places],
                },
            )

    def _count(self, stream: LiveStream, upto: int, nbytes: int, now: float) -> None:
        request, measures = stream.request, stream.line.figures.measures.streams
        count = upto - request.delivered
        if request.delivered:
            measures.went_on(count, nbytes, now - stream.latest)
        else:
            measures.began(count, nbytes, now - request.arrived)
        request.delivered = upto
        stream.latest = now

    def read(
        self,
        requests: dict[Key, Request],
        client: str,
        keys: list[Key],
        taken: list[int],
    ) -> None:
        """Tell workers what a client has read."""
        told: dict[tuple[str, str], tuple[list[Key], list[int]]] = {}
        for key, count in zip(keys, taken, strict=True):
            request = requests.get(key)
            if request is None or request.client != client or request.stream is None:
                continue
            if count < 0:
                # Who runs it next need not wait for the reader either.
                order = request.stream
                order["nbytes"] = order["chunks"] = _ENDLESS
                order["read"] = order["read"] and count != LEFT
            stream = self.live.find(request.batch, key)
            if stream is not None:
                which = stream.device.name, stream.batch_id
                batch_keys, counts = told.setdefault(which, ([], []))
                batch_keys.append(key)
                counts.append(count)
        for (address, batch_id), (batch_keys, counts) in told.items():
            self._tell_read(batch_id, address, batch_keys, counts)

    def _tell_read(
        self, batch_id: str, address: str, keys: list[Key], taken: list[int]
    ) -> None:
        self._send(
            address,
            {
                "op": protocol.READ,
                "batch": batch_id,
                "keys": keys,
                "taken": taken,
                "stimulus_id": f"daskinfer-read-{batch_id}",
            },
        )

    # They end

    def ended(self, message: protocol.EndedMessage, address: str) -> None:
        """Give streams that have ended on a worker their results, or their errors."""
        stimulus_id, batch_id = message["stimulus_id"], message["batch"]
        over: dict[Key, LiveStream] = {}
        for key in (*message["keys"], *message["failed"]):
            stream = self._found(batch_id, key, address)
            if stream is not None:
                self._remove(stream)
                over[key] = stream
        run_ids = {key: stream.run_id for key, stream in over.items()}
        clients = {key: stream.request.client for key, stream in over.items()}
        stop, now = time(), monotonic()
        began = min((stream.began for stream in over.values()), default=now)
        startstop = {"action": "compute", "start": stop - (now - began), "stop": stop}

        def metadata(key: Key) -> dict[str, Any]:
            stream = over[key]
            request, line = stream.request, stream.line
            return {
                "name": line.name,
                "version": line.version,
                "digest": line.digest,
                "worker": address,
                "device": message["device"],
                "batch_size": request.rows,
                "queue_seconds": request.dispatched - request.arrived,
                "compute_seconds": now - request.dispatched,
                "attempts": request.attempts,
                "cached": False,
                "chunks": message["counts"].get(key, 0),
            }

        whole: Any = message
        self._tasks.complete(whole, run_ids, address, clients, metadata, startstop)
        failed = {k: f for k, f in message["failed"].items() if k in over}
        for key, failure in failed.items():
            request = over[key].request
            request.tried |= {address}
            request.cause = cause_on_worker(failure)
            if request.delivered and not request.replays:
                # Another attempt might give others.
                self._tasks.forgo_retries(key)
            why = f"{type_of(failure)} was raised on {address}"
            request.trail.interrupt(monotonic(), why)
        if failed:
            self._tasks.fail_running(failed, run_ids, address, stimulus_id)
        for key, count in message["counts"].items():
            if key in over and key not in failed:
                over[key].line.pace.ended(count)
        for stream in over.values():
            how = "failed" if stream.request.key in failed else "ended"
            stream.line.figures.measures.streams.ended(how)

    def unassign(self, request: Request) -> bool:
        """Take out the stream of a request that is not wanted; tell if there was one.

        It stays if the worker is gone, until :meth:`lost` is asked what it had.
        """
        stream = self.live.find(request.batch, request.key)
        if stream is None or not self._tasks.has_worker(stream.device.name):
            return False
        self._remove(stream)
        stream.line.figures.measures.streams.ended("stopped")
        self.refuse(stream.batch_id, stream.device.name, [request.key])
        return True

    def end(self, name: str, version: str) -> None:
        """A version is not served any more: what would have no end has one now."""
        endless = [
            stream.request.key
            for stream in self.live
            if (stream.line.name, stream.line.version) == (name, version)
            and stream.request.stream is not None
            and not stream.request.stream["keep"]
        ]
        if endless:
            gone = UnknownDeployment(f"{name!r} was undeployed while it streamed")
            self._tasks.fail(endless, gone, "daskinfer-undeployed")

    def lost(self, address: str, *, beside: bool, expected: bool) -> None:
        """A worker is gone; Dask has parked its requests already.

        There may have been batches ``beside`` its streams. It left on purpose if that
        was ``expected``, and nobody is to blame.
        """
        found = self._take_out(address)
        alone = len(found) == 1 and not beside
        for stream in found:
            self._cut_off(stream, WorkerLost, alone, expected=expected)

    def device_failed(self, address: str, reason: str) -> None:
        """Nothing runs on a worker's device any more."""
        found = self._take_out(address)
        keys = [stream.request.key for stream in found]
        self._tasks.release_running(keys, "daskinfer-stream-back")
        for stream in found:
            self._cut_off(stream, DeviceError, len(found) == 1, reason)

    def clear(self) -> None:
        """Forget all streams."""
        for stream in list(self.live):
            self._remove(stream)
        self._unwanted.clear()

    def _take_out(self, address: str) -> list[LiveStream]:
        found = self.live.on(address)
        for stream in found:
            self._remove(stream)
            stream.line.figures.measures.streams.ended("interrupted")
        return found

    def _cut_off(
        self,
        stream: LiveStream,
        kind: type[RequestFailed],
        alone: bool,
        reason: str = "",
        *,
        expected: bool = False,
    ) -> None:
        request, line = stream.request, stream.line
        if request.forgotten:
            return
        line.figures.measures.interrupted[cause_of(kind)] += 1
        address = stream.device.name
        what = f"the device of {address} broke" if reason else f"{address} was lost"
        request.trail.interrupt(monotonic(), f"{what} while it streamed")
        if request.delivered and not request.replays:
            self._recovery.cut_off(request, line, kind, address, reason)
        elif not expected:
            self._recovery.charge_stream(request, line, kind, address, alone, reason)

    def _found(self, batch_id: str, key: Key, address: str) -> LiveStream | None:
        stream = self.live.find(batch_id, key)
        return stream if stream and stream.device.name == address else None

    def _remove(self, stream: LiveStream) -> None:
        self.live.remove(stream)
        if stream.request.batch == stream.batch_id:
            stream.request.batch = None
