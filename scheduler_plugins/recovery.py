"""What becomes of requests whose attempt the engine has seen fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import monotonic

from daskinfer.exceptions import BatchTimeout, DeviceError, RequestFailed, WorkerLost
from daskinfer.logs import Log
from daskinfer.wording import counted
from scheduler_plugins import isolation, retrying
from scheduler_plugins.deadlines import Deadlines
from scheduler_plugins.outcomes import cause_of
from scheduler_plugins.retrying import Fail
from scheduler_plugins.trail import HELD_BACK

if TYPE_CHECKING:
    from scheduler_plugins.line import Batch, Line
    from scheduler_plugins.request import Request
    from scheduler_plugins.taskstate import TaskStates

logger = Log("recovery")

#: How attempts end that are charged, before the worker's address.
_WHY: dict[type[RequestFailed], str] = {
    WorkerLost: "its process ended on",
    BatchTimeout: "the batch ran for too long on",
    DeviceError: "the device broke on",
}


class Recovery:
    """Gives requests another attempt, isolated or later, or their end.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    requeue
        Lets a parked request wait, in the lane that it belongs to now.
    line_of
        Tells who serves a request by now, given who did.

    Attributes
    ----------
    delayed
        When requests that are held back wait again.

    Notes
    -----
    All requests that are given to it are parked by now, or wait for inputs that were
    lost with them.
    """

    def __init__(
        self,
        tasks: TaskStates,
        requeue: Callable[[Request, Line], None],
        line_of: Callable[[Request, Line], Line],
    ) -> None:
        self.delayed: Deadlines[Key] = Deadlines()
        self._tasks = tasks
        self._requeue = requeue
        self._line_of = line_of
        self._held: dict[Key, tuple[Request, Line]] = {}

    def __repr__(self) -> str:
        return f"<Recovery delayed: {len(self.delayed)}>"

    # Workers that are gone

    def worker_lost(self, batches: Sequence[tuple[Batch, Sequence[Request]]]) -> None:
        """A worker has died with batches, given in the order in which they were sent.

        One of them was running. The others waited for their turn, as far as can be
        known.
        """
        for batch, requests in batches:
            if batch.died:
                self._tell_died(batch)
                alone = len(batch.run_ids) == 1
                self._charge(batch, requests, WorkerLost, alone=alone)
            else:
                self._count_bystanders(batch, requests)

    def _tell_died(self, batch: Batch) -> None:
        logger.warning(
            "%s died while it ran batch %s of %r, which had %s",
            batch.device.name,
            batch.batch_id,
            batch.line.name,
            counted(len(batch.run_ids), "request"),
            **_about(batch),
            limited=False,
        )

    def _charge(
        self,
        batch: Batch,
        requests: Sequence[Request],
        kind: type[RequestFailed],
        *,
        alone: bool,
        reason: str = "",
    ) -> None:
        """Charge those who were running; run them isolated, or let them fail."""
        batch.line.figures.measures.interrupted[cause_of(kind)] += len(requests)
        self._note(requests, f"{_WHY[kind]} {batch.device.name}")
        for request in requests:
            request.charges += 1
            request.solo += alone
        self._isolate(batch, requests)
        for request in requests:
            self._judge(request, batch, kind, alone, reason)

    def _judge(
        self,
        request: Request,
        batch: Batch,
        kind: type[RequestFailed],
        alone: bool,
        reason: str,
    ) -> None:
        policy, now = batch.line.retry, monotonic()
        proven = isolation.is_proven(request.solo, policy.max_attempts)
        charges = request.charges if proven else 0
        decision = retrying.decide(policy, kind, charges, now, random.random())
        if isinstance(decision, Fail):
            if alone and not self._tasks.spend_retry(request.key):
                self._fail(request, batch.line, kind, batch.device.name, reason)
        elif decision.not_before > now:
            self.hold_back(request, batch.line, decision.not_before)

    def _isolate(self, batch: Batch, requests: Sequence[Request]) -> None:
        for number, part in enumerate(isolation.divide(requests)):
            for request in part:
                request.group = (batch.batch_id, number)
                self._requeue(request, batch.line)

    def _note(self, requests: Sequence[Request], told: str) -> None:
        now = monotonic()
        for request in requests:
            request.trail.interrupt(now, told)

    def _count_bystanders(self, batch: Batch, requests: Sequence[Request]) -> None:
        self._note(requests, f"{batch.device.name} died before the batch began there")
        for request in requests:
            request.bystander += 1
        suspects = [r for r in requests if r.bystander >= isolation.BYSTANDER_LIMIT]
        self._isolate(batch, suspects)

    # Devices that are late

    def timed_out(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch was given up for being past its time limit, with these requests."""
        for request in requests:
            request.tried |= {batch.device.name}
        alone = len(batch.run_ids) == 1
        self._charge(batch, requests, BatchTimeout, alone=alone)

    def moved(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Requests were taken away from a device that does not answer."""
        batch.line.figures.measures.interrupted["late"] += len(requests)
        self._note(requests, f"{batch.device.name} is late, and others are asked")
        for request in requests:
            self._requeue(request, batch.line)

    # Devices that break

    def sent_back(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Requests wait again whose device broke before they were run."""
        self._note(requests, f"the device broke before, on {batch.device.name}")

    def device_failed(
        self, batch: Batch, requests: Sequence[Request], reason: str
    ) -> None:
        """A device has broken under requests, which one of them may have caused."""
        logger.warning(
            "The device of %s broke while it ran %s of %r: %s",
            batch.device.name,
            counted(len(requests), "request"),
            batch.line.name,
            reason,
            **_about(batch),
            limited=False,
        )
        alone = len(requests) == 1
        self._charge(batch, requests, DeviceError, alone=alone, reason=reason)

    # Streams

    def cut_off(
        self,
        request: Request,
        line: Line,
        kind: type[RequestFailed],
        address: str,
        reason: str = "",
    ) -> None:
        """A stream has lost its worker or device, and nobody can go on for it."""
        chunks = counted(request.delivered, "chunk")
        why = f" ({reason})" if reason else ""
        what = f"the device of {address}" if kind is DeviceError else address
        told = (
            f"{what}, which streamed {request.key!r} of {line.name!r}, is gone{why}; "
            f"{chunks} had been delivered: ask again, or with resume='replay' if the "
            "model always gives the same chunks"
        )
        self._fail(request, line, kind, address, told=told)

    def charge_stream(
        self,
        request: Request,
        line: Line,
        kind: type[RequestFailed],
        address: str,
        alone: bool,
        reason: str = "",
    ) -> None:
        """A stream has lost its worker or device, and may be tried again.

        It is proven to be the cause if it was alone there. Others are tried somewhat
        more often: there are more of them than of causes.
        """
        request.charges += 1
        request.solo += alone
        policy, now = line.retry, monotonic()
        charges = request.charges
        if not isolation.is_proven(request.solo, policy.max_attempts):
            limit = policy.max_attempts + isolation.BYSTANDER_LIMIT
            charges = policy.max_attempts if charges >= limit else 0
        decision = retrying.decide(policy, kind, charges, now, random.random())
        if isinstance(decision, Fail):
            if not self._tasks.spend_retry(request.key):
                self._fail(request, line, kind, address, reason)
        elif decision.not_before > now:
            self.hold_back(request, line, decision.not_before)

    # Waiting until later

    def hold_back(self, request: Request, line: Line, until: float) -> None:
        """Let a request wait for nothing but a monotonic time, in seconds."""
        line = self._line_of(request, line)
        told = f"for {max(until - monotonic(), 0.0):.3g} s, before it is tried again"
        request.trail.note(monotonic(), HELD_BACK, told)
        if request.queue is not None:
            request.queue.discard(request)
        if not request.delayed:
            request.delayed = True
            line.delayed += 1
        self._held[request.key] = request, line
        self.delayed.set(request.key, until)

    def held(self, line: Line) -> list[Request]:
        """Those of a version that are held back."""
        return [request for request, its in self._held.values() if its is line]

    def release(self, now: float) -> None:
        """Let those wait again whose time has come."""
        for key in self.delayed.expired(now):
            request, line = self._held[key]
            self.forget(request)
            self._requeue(request, line)

    def forget(self, request: Request) -> None:
        """A request is held back no longer."""
        _, line = self._held.pop(request.key)
        request.delayed = False
        line.delayed -= 1
        self.delayed.discard(request.key)

    def clear(self) -> None:
        """Forget all requests."""
        for request, _ in list(self._held.values()):
            self.forget(request)

    # The end

    def _fail(
        self,
        request: Request,
        line: Line,
        kind: type[RequestFailed],
        address: str,
        reason: str = "",
        told: str = "",
    ) -> None:
        error = kind(
            told or _told(kind, request, line, address, reason),
            key=request.key,
            name=line.name,
            version=line.version,
            worker=address,
            attempts=request.attempts,
            chunks=request.delivered,
        )
        request.cause = cause_of(kind)
        self._tasks.fail([request.key], error, f"daskinfer-failed-{line.name}")


def _about(batch: Batch) -> dict[str, Any]:
    return {
        "deployment": batch.line.name,
        "version": batch.line.version,
        "stimulus_id": batch.stimulus_id,
    }


def _told(
    kind: type[RequestFailed], request: Request, line: Line, address: str, reason: str
) -> str:
    times = counted(request.charges, "time")
    if kind is WorkerLost:
        alone = f", {request.solo} of them while it ran nothing else"
        if request.charges == request.solo:
            alone = ""
        return (
            f"the worker that ran {request.key!r} of {line.name!r} died {times}"
            f"{alone}; the last was {address}. Its input may end the process (a crash "
            "in native code, too much memory): see the workers' logs"
        )
    if kind is DeviceError:
        return (
            f"the device that ran {request.key!r} of {line.name!r} broke {times}; the "
            f"last was that of {address}: {reason}. Its input may be the cause (an "
            "index out of range): see the workers' logs"
        )
    return (
        f"{request.key!r} of {line.name!r} failed {times} by {kind.__name__}; the last "
        f"worker was {address}: see its log"
    )
