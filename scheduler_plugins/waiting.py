"""Who waits for a batch, and for which version's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.metrics import monotonic

from scheduler_plugins.recovery import Recovery
from scheduler_plugins.trail import QUEUED

if TYPE_CHECKING:
    from scheduler_plugins.admission import Admission
    from scheduler_plugins.line import Line
    from scheduler_plugins.lines import Lines
    from scheduler_plugins.request import Request
    from scheduler_plugins.taskstate import TaskStates


class Waiting:
    """Requests that stand in the queue of a line, or are held back for a while.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    lines
        All versions in service.
    admission
        Knows who may share a pass.
    place
        Finds the line for a request that has stood in another one; None if it fails.
    wake
        Called when there is something new to decide.

    Attributes
    ----------
    recovery
        Holds back who is to wait for the next attempt.
    """

    def __init__(
        self,
        tasks: TaskStates,
        lines: Lines,
        admission: Admission,
        place: Callable[[Request, Line], Line | None],
        wake: Callable[[], None],
    ) -> None:
        self.recovery = Recovery(tasks, self.requeue, lines.holding)
        self._tasks = tasks
        self._lines = lines
        self._admission = admission
        self._place = place
        self._wake = wake

    def __repr__(self) -> str:
        waiting = sum(len(line.queue) for line in self._lines.values())
        return f"<Waiting: {waiting} {self.recovery!r}>"

    def enqueue(self, request: Request, line: Line) -> None:
        """Let a request wait for a batch."""
        if not line.queue.count and not line.in_flight:
            # A deployment that was idle has no claim on the time it did not use.
            line.served = max(
                line.served, min((o.served for o in self._lines.busy()), default=0.0)
            )
        # Without rows it still takes a pass; and a lane of no rows is never served.
        request.rows = max(request.rows, 1)
        if not request.attempts:
            line.batcher.arrived(request.rows, monotonic())
        self._push(request, line)

    def _push(self, request: Request, line: Line) -> None:
        if request.delayed:
            self.recovery.forget(request)
        request.trail.note(monotonic(), QUEUED, line.version)
        request.lane = self._admission.lane_of(request, line)
        line.queue.push(request)
        self._wake()

    def requeue(self, request: Request, line: Line) -> None:
        """Let a request wait where it belongs by now."""
        line = self._lines.holding(request, line)
        if request.waiting:
            line.queue.discard(request)
        elif request.error is not None or not self._tasks.is_parked(request.key):
            # It is about to fail, or waits for inputs first.
            return
        place = self._place(request, line)
        if place is not None:
            self._push(request, place)

    def reroute(self, name: str) -> None:
        """Let the requests of a deployment wait for the versions that answer by now.

        They keep their places.
        """
        for line in self._lines.of(name):
            for request in line.queue.requests() + self.recovery.held(line):
                place = self._place(request, line)
                if place is not line:
                    self.discard(request)
                if place is not None and place is not line:
                    self.enqueue(request, place)

    def discard(self, request: Request) -> None:
        """A request waits no longer."""
        if request.queue is not None:
            request.queue.discard(request)
        if request.delayed:
            self.recovery.forget(request)

    def leave(self, line: Line) -> list[Request]:
        """Let nobody wait for a version any longer; return who did."""
        waiting = line.queue.requests() + self.recovery.held(line)
        for request in waiting:
            self.discard(request)
        return waiting
