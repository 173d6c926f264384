"""What becomes of requests whose attempt the engine has seen fail."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dask.typing import Key
from distributed.metrics import monotonic

from daskinfer.exceptions import BatchTimeout, RequestFailed, WorkerLost
from daskinfer.wording import counted
from scheduler_plugins import isolation, retrying
from scheduler_plugins.deadlines import Deadlines
from scheduler_plugins.retrying import Fail

if TYPE_CHECKING:
    from scheduler_plugins.line import Batch, Line
    from scheduler_plugins.queueing import Request
    from scheduler_plugins.taskstate import TaskStates

logger = logging.getLogger("distributed.inference.recovery")


class Recovery:
    """Gives requests another attempt, isolated or later, or their end.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    requeue
        Lets a parked request wait, in the lane that it belongs to now.

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
        self, tasks: TaskStates, requeue: Callable[[Request, Line], None]
    ) -> None:
        self.delayed: Deadlines[Key] = Deadlines()
        self._tasks = tasks
        self._requeue = requeue
        self._held: dict[Key, tuple[Request, Line]] = {}

    def __repr__(self) -> str:
        return f"<Recovery delayed: {len(self.delayed)}>"

    # Workers that are gone

    def worker_lost(self, batches: Sequence[tuple[Batch, Sequence[Request]]]) -> None:
        """A worker has died with batches, given in the order in which they were sent.

        The first of them was running. The others were queued behind it, as far as
        can be known.
        """
        for place, (batch, requests) in enumerate(batches):
            if place == 0:
                self._tell_died(batch)
                self._charge_batch(batch, requests, WorkerLost)
            else:
                self._count_bystanders(batch, requests)

    def _tell_died(self, batch: Batch) -> None:
        logger.warning(
            "%s died while it ran batch %s of %r, which had %s",
            batch.device.name,
            batch.batch_id,
            batch.line.name,
            counted(len(batch.run_ids), "request"),
        )

    def _charge_batch(
        self, batch: Batch, requests: Sequence[Request], kind: type[RequestFailed]
    ) -> None:
        """Charge those who were running; run them isolated, or let them fail."""
        alone = len(batch.run_ids) == 1
        for request in requests:
            request.charges += 1
            request.solo += alone
        self._isolate(batch, requests)
        for request in requests:
            self._judge(request, batch, kind, alone)

    def _judge(
        self, request: Request, batch: Batch, kind: type[RequestFailed], alone: bool
    ) -> None:
        policy, now = batch.line.retry, monotonic()
        proven = isolation.is_proven(request.solo, policy.max_attempts)
        charges = request.charges if proven else 0
        decision = retrying.decide(policy, kind, charges, now, random.random())
        if isinstance(decision, Fail):
            if alone and not self._tasks.spend_retry(request.key):
                self._fail(request, batch.line, kind, batch.device.name)
        elif decision.not_before > now:
            self._hold_back(request, batch.line, decision.not_before)

    def _isolate(self, batch: Batch, requests: Sequence[Request]) -> None:
        for number, part in enumerate(isolation.divide(requests)):
            for request in part:
                request.group = (batch.batch_id, number)
                self._requeue(request, batch.line)

    def _count_bystanders(self, batch: Batch, requests: Sequence[Request]) -> None:
        for request in requests:
            request.bystander += 1
        suspects = [r for r in requests if r.bystander >= isolation.BYSTANDER_LIMIT]
        self._isolate(batch, suspects)

    # Devices that are late

    def timed_out(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch was given up for being past its time limit, with these requests."""
        for request in requests:
            request.tried |= {batch.device.name}
        self._charge_batch(batch, requests, BatchTimeout)

    def moved(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Requests were taken away from a device that does not answer."""
        for request in requests:
            self._requeue(request, batch.line)

    # Other failures of the engine

    def attempt_failed(
        self, request: Request, line: Line, kind: type[RequestFailed], address: str
    ) -> None:
        """Charge a request with a failure of its own attempt on a worker.

        It is tried again elsewhere, after a while, as far as the policy goes; then as
        far as the user's ``retries=`` go.
        """
        request.charges += 1
        request.tried |= {address}
        now = monotonic()
        decision = retrying.decide(
            line.retry, kind, request.charges, now, random.random()
        )
        if not isinstance(decision, Fail):
            if decision.not_before > now:
                self._hold_back(request, line, decision.not_before)
            else:
                self._requeue(request, line)
        elif self._tasks.spend_retry(request.key):
            self._requeue(request, line)
        else:
            self._fail(request, line, kind, address)

    def _hold_back(self, request: Request, line: Line, until: float) -> None:
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
        self, request: Request, line: Line, kind: type[RequestFailed], address: str
    ) -> None:
        error = kind(
            _told(kind, request, line, address),
            key=request.key,
            name=line.name,
            version=line.version,
            worker=address,
            attempts=request.attempts,
        )
        self._tasks.fail([request.key], error, f"daskinfer-failed-{line.name}")


def _told(kind: type[RequestFailed], request: Request, line: Line, address: str) -> str:
    times = counted(request.charges, "time")
    if kind is WorkerLost:
        alone = "" if request.charges == request.solo else f", {request.solo} alone"
        return (
            f"the worker that ran {request.key!r} of {line.name!r} died {times}"
            f"{alone}; the last was {address}. Its input may end the process (a crash "
            "in native code, too much memory): see the workers' logs"
        )
    return (
        f"{request.key!r} of {line.name!r} failed {times} by {kind.__name__}; the last "
        f"worker was {address}: see its log"
    )
