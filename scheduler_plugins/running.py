"""The batches that were sent and are not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from dask.typing import Key
from distributed.metrics import monotonic

from daskinfer import protocol
from scheduler_plugins.line import Batch, LaneKey, Line
from scheduler_plugins.outcomes import INPUTS
from scheduler_plugins.sending import pickle_inputs, run_message
from scheduler_plugins.settling import Settlement
from scheduler_plugins.trail import SENT

if TYPE_CHECKING:
    from scheduler_plugins.batching import Send
    from scheduler_plugins.load import Link
    from scheduler_plugins.queueing import Lane
    from scheduler_plugins.request import Request
    from scheduler_plugins.routing import Edition
    from scheduler_plugins.taskstate import TaskStates


class Running:
    """Sends batches, and takes their answers in.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    send
        Sends a message to a worker: ``send(address, message)``.
    link
        Learns what messages take.

    Attributes
    ----------
    batches
        By name, in the order in which they were sent.
    unwanted
        By batch, requests that its worker is still to be told to drop.
    edition
        What is active now.
    """

    def __init__(
        self,
        tasks: TaskStates,
        send: Callable[[str, Any], None],
        link: Link,
    ) -> None:
        self.batches: dict[str, Batch] = {}
        self.unwanted: dict[str, list[Key]] = {}
        self.edition: Edition | None = None
        self._tasks = tasks
        self._settlement = Settlement(tasks)
        self._send = send
        self._link = link
        self._sequence = 0

    def __repr__(self) -> str:
        return f"<Running batches: {len(self.batches)}>"

    def workers(self) -> set[str]:
        """Workers that have a batch."""
        return {batch.device.name for batch in self.batches.values()}

    def dispatch(self, line: Line, lane: Lane, decision: Send) -> Batch | None:
        """Send requests of a lane to the device that was chosen.

        Returns
        -------
        Batch or None
            What was sent, if anything could be.
        """
        now = monotonic()
        requests = line.queue.take(lane, decision.rows)
        self._sequence += 1
        batch_id = f"{line.name}-{self._sequence}"
        stimulus_id = f"daskinfer-run-{batch_id}"
        address = decision.device.name
        keys = [request.key for request in requests]
        run_ids = self._tasks.dispatch(keys, address, stimulus_id)
        batch = Batch(
            batch_id,
            line,
            decision.device,
            run_ids,
            {request.key: request for request in requests if request.key in run_ids},
            sum(request.rows for request in requests if request.key in run_ids),
            now,
            retry=bool(cast(LaneKey, lane.key).tried),
            looked_up=decision.reason == "cached",
        )
        payloads, failures = pickle_inputs(self._tasks, batch.requests)
        # Registered before anything can fail, so that every exit passes one door.
        self.batches[batch_id] = batch
        retries = 0
        for request in batch.requests.values():
            request.batch, request.dispatched = batch_id, now
            request.trail.note(now, SENT, batch.attempt)
            request.attempts += 1
            retries += request.attempts > 1
            request.cause = ""
            request.figures = line.figures
            if not request.is_bound:
                request.edition = self.edition
        line.in_flight += 1
        batch.begins = len(run_ids) if line.kind != protocol.PLAIN else 0
        line.begins[address] += batch.begins
        line.figures.measures.dispatched(decision.reason, retries)
        rows = max(batch.rows, 1)
        if batch.looked_up:
            line.batcher.looked_up(
                decision, batch_id, now, rows=rows, requests=len(run_ids)
            )
        else:
            line.batcher.sent(decision, batch_id, now, rows=rows)
            self._serve(batch)
        if failures:
            for key in failures:
                batch.requests[key].cause = INPUTS
            self._tasks.fail_running(failures, run_ids, address, stimulus_id)
        if not payloads:
            self._close(batch)
            line.batcher.lost(batch_id, decision.device, now)
            return None
        self._send(address, run_message(self._tasks, batch, payloads))
        return batch

    def _serve(self, batch: Batch) -> None:
        """Charge a version with the time of a batch on the device."""
        device, line = batch.device, batch.line
        batch.predicted = line.latency.seconds(
            device.name, device.device_class, max(batch.rows, 1)
        )
        line.served += batch.predicted

    def not_found(self, batch: Batch) -> None:
        """A batch is not in the cache where it should be, and is computed there."""
        flight = batch.device.flight(batch.batch_id)
        if flight is not None:
            batch.device.not_found(flight, monotonic(), self._link)
            self._serve(batch)

    def unassign(self, request: Request) -> bool:
        """Take a request out of its batch; tell whether it was part of one.

        It stays if the worker is gone, until :meth:`lost` is asked what it had.
        """
        batch = self.batches.get(request.batch or "")
        if batch is not None and not self._tasks.has_worker(batch.device.name):
            return False
        request.batch = None
        if batch is None or batch.requests.pop(request.key, None) is None:
            return False
        self.unwanted.setdefault(batch.batch_id, []).append(request.key)
        return True

    def give_up(self, batch: Batch, requests: Sequence[Request]) -> list[Request]:
        """Park requests of a batch again, and take its late results if they come.

        Returns
        -------
        list of Request
            Those that the batch still had.
        """
        held = [r for r in requests if batch.requests.pop(r.key, None) is not None]
        for request in held:
            request.batch = None
            batch.given_up[request.key] = request
        self._tasks.park_running([r.key for r in held], f"{batch.stimulus_id}-late")
        return held

    def recall(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Park requests of a batch again that has not begun; its worker drops them."""
        keys = [request.key for request in requests]
        self._tasks.release_running(keys, f"{batch.stimulus_id}-recall")

    def drop_unwanted(self) -> None:
        """Tell workers which requests of their batches nobody wants any more."""
        for batch_id, keys in self.unwanted.items():
            batch = self.batches.get(batch_id)
            if batch is not None:
                message: protocol.DropMessage = {
                    "op": protocol.DROP,
                    "batch": batch_id,
                    "keys": keys,
                    "stimulus_id": f"daskinfer-drop-{batch_id}",
                }
                self._send(batch.device.name, message)
        self.unwanted.clear()

    def lost(self, address: str) -> list[tuple[Batch, list[Request]]]:
        """A device is gone; return its batches, in order, and who was still in them."""
        gone = [b for b in self.batches.values() if b.device.name == address]
        held = [(batch, list(batch.requests.values())) for batch in gone]
        for batch in gone:
            batch.died = batch.is_running
        for batch in gone:
            self._lose(batch)
        return held

    def clear(self) -> None:
        """Forget all batches."""
        for batch in list(self.batches.values()):
            self._lose(batch)
        self.unwanted.clear()

    def _lose(self, batch: Batch) -> None:
        self._close(batch)
        batch.line.batcher.lost(batch.batch_id, batch.device, monotonic())

    # Answers

    def done(
        self, message: protocol.DoneMessage, address: str
    ) -> tuple[Batch | None, list[Request]]:
        """Take in what a worker says of a batch.

        Returns
        -------
        Batch or None
            Which it was; None if nobody waits for its answer.
        list of Request
            Who of it was running when the device broke; parked again.
        """
        now = monotonic()
        batch = self.batches.get(message["batch"])
        if batch is None or batch.device.name != address:
            # Given up already: its requests are running elsewhere, or not wanted.
            self._tasks.complete(message, {}, address, {}, lambda key: {}, {})
            return None, []
        batch.attempt.answered(now, message)
        line, own = batch.line, dict(batch.requests)
        self._close(batch)
        passes = message["passes"]
        if message["look_up"]:
            line.hit_cost.observe(message["look_up"], len(batch.run_ids))
        if message["out_of_memory"]:
            line.latency.out_of_memory(
                batch.device.device_class, message["out_of_memory"], now
            )
        line.batcher.completed(
            batch.batch_id,
            batch.device,
            _timings(message),
            now,
        )
        if passes:
            busy = message["waited"] + message["ran"]
            self._link.observe(max(now - batch.sent_at - busy, 0.0))
        line.counts.ran(
            address, [(p["rows"], p["padded"], p["seconds"]) for p in passes]
        )
        if passes:
            line.figures.measures.ran(
                [(p["rows"], p["padded"]) for p in passes],
                message["ran"],
                batch.predicted if _tests(message, batch.rows) else None,
            )
        self._settlement.settle(batch, dict(own), message, address)
        return batch, [own[key] for key in message["struck"] if key in own]

    def release(self, requests: Iterable[Request], stimulus_id: str) -> None:
        """Let requests wait again that were sent to a worker which is still there."""
        self._tasks.release_running([r.key for r in requests], stimulus_id)

    def _close(self, batch: Batch) -> None:
        if self.batches.pop(batch.batch_id, None) is not None:
            batch.line.in_flight -= 1
            batch.line.begins[batch.device.name] -= batch.begins
            batch.line.used[batch.device.name] = monotonic()
        for request in batch.given_up.values():
            # Nothing more will come of it here, so it may be moved once more.
            request.hedged = False
        for request in batch.requests.values():
            request.batch = None
        batch.requests.clear()
        self.unwanted.pop(batch.batch_id, None)


def _timings(message: protocol.DoneMessage) -> list[tuple[int, float]]:
    """Rows of each pass, and the seconds that it took on the device's thread.

    Those are more than the model took: inputs are unpickled and joined, and outputs are
    divided. Left out of account, small batches would look better than they are. What a
    batch took in which something failed is not that of its passes, nor is that of one
    that was looked up, which may have had the thread more than once.
    """
    passes = [p for p in message["passes"] if p["rows"]]
    beside = 0.0
    if passes and _is_pure(message):
        beside = max(message["ran"] - sum(p["seconds"] for p in message["passes"]), 0.0)
    rows = sum(p["rows"] for p in passes)
    return [(p["rows"], p["seconds"] + beside * p["rows"] / rows) for p in passes]


def _is_pure(message: protocol.DoneMessage) -> bool:
    """Whether a batch took its time for its passes alone."""
    return not (message["failed"] or message["out_of_memory"] or message["look_up"])


def _tests(message: protocol.DoneMessage, rows: int) -> bool:
    """Whether what a batch took tells how good the prediction for so many rows was."""
    ran = sum(p["rows"] for p in message["passes"])
    return ran == rows and _is_pure(message)
