"""Sends what waits to the devices that want it, and takes the answers in.

The policies decide (:mod:`~scheduler_plugins.choosing` asks them); this shell enacts
what they say after every event, and arms one timer for their next wish.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import monotonic

from scheduler_plugins.admission import Admission
from scheduler_plugins.choosing import Choice, Chooser
from scheduler_plugins.deadlines import Deadlines
from scheduler_plugins.fitness import Fitness
from scheduler_plugins.health import Suspicion
from scheduler_plugins.line import Batch, Line
from scheduler_plugins.lines import Lines
from scheduler_plugins.load import DeviceLoad, Link
from scheduler_plugins.queueing import Request
from scheduler_plugins.recovery import Recovery
from scheduler_plugins.running import Running
from scheduler_plugins.starving import Starvation
from scheduler_plugins.supervision import Supervision
from scheduler_plugins.timer import Timer

if TYPE_CHECKING:
    from daskinfer.protocol import DoneMessage
    from scheduler_plugins.taskstate import TaskStates

logger = logging.getLogger("distributed.inference.dispatcher")


class Dispatcher:
    """Turns waiting requests into batches on workers.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    send
        Sends a message to a worker: ``send(address, message)``.
    report
        Called with a line that has waited for ``warn_after`` seconds without any
        device to go to.
    expire
        Called with the requests whose deadline has come.
    hung
        Called with the address of a worker whose device hangs, and how that is known.
    priority_age, warn_after
        Seconds; see the configuration.
    suspicion
        From when on a batch tells against its device.
    place
        Finds the line for a request that has stood in another one; None if it fails.

    Notes
    -----
    Lives on the scheduler's event loop.
    """

    def __init__(
        self,
        tasks: TaskStates,
        send: Callable[[str, Any], None],
        report: Callable[[Line], None],
        expire: Callable[[list[Key]], None],
        hung: Callable[[str, str], None],
        *,
        priority_age: float,
        warn_after: float,
        suspicion: Suspicion,
        place: Callable[[Request, Line], Line | None] = lambda request, line: line,
    ) -> None:
        self.tasks = tasks
        self.link = Link()
        self.lines = Lines(self.link, priority_age)
        self.statistics = self.lines.statistics
        self.running = Running(tasks, send, self.link)
        self.recovery = Recovery(tasks, self._requeue, self.lines.holding)
        self.deadlines: Deadlines[Key] = Deadlines()
        self._admission = Admission(tasks)
        fitness = Fitness(self.lines.values(), self._admission, self.link)
        self.supervision = Supervision(
            self.lines.values(),
            self.running,
            self.recovery,
            self._admission,
            fitness,
            self.link,
            suspicion,
            hung,
        )
        self._starvation = Starvation(report, warn_after)
        self.chooser = Chooser(self._admission, fitness, self._starvation, self.link)
        self._devices: dict[tuple[str, str], DeviceLoad] = {}
        self._expire = expire
        self._place = place
        self._woken = False
        self._timer = Timer(self.wake)

    def __repr__(self) -> str:
        waiting = sum(len(line.queue) for line in self.lines.values())
        return (
            f"<Dispatcher lines: {len(self.lines)} waiting: {waiting} "
            f"batches: {len(self.running.batches)}>"
        )

    # Events

    def close(self, name: str, version: str) -> list[Request]:
        """Stop serving a version; return who waited for it."""
        line = self.lines.pop((name, version))
        self._starvation.ended(line)
        waiting = line.queue.requests() + self.recovery.held(line)
        for request in waiting:
            self.discard(request)
        return waiting

    def forget(self, name: str) -> None:
        """Drop the counters of a deployment."""
        self.statistics.pop(name, None)

    def device_ready(
        self,
        name: str,
        version: str,
        address: str,
        device_class: str,
        timings: Iterable[tuple[int, float]],
        doubt: str | None = None,
    ) -> None:
        """A worker has loaded a version and measured it.

        With a ``doubt``, it is tried with one request before it is given more.
        """
        line = self.lines.get((name, version))
        if line is None:
            return
        beside = next((d for d in self._devices.values() if d.name == address), None)
        new = DeviceLoad(address, device_class, beside)
        device = self._devices.setdefault((address, device_class), new)
        line.devices[address] = device
        line.device_class = device_class
        line.latency.seed(address, device_class, timings)
        if doubt is not None:
            line.health.doubt(address, monotonic(), doubt)
        self.wake()

    def workers_changed(self) -> None:
        """There is something new to say about who serves what: say it again."""
        self._starvation.clear()
        self.wake()

    def worker_lost(self, address: str, *, expected: bool = False) -> None:
        """A worker is gone; Dask has parked its requests already.

        Nobody is charged for one that has left on purpose, as is ``expected``.
        """
        batches = self._take_out(address)
        for counts in self.statistics.values():
            counts.workers.pop(address, None)
        if not expected:
            self.recovery.worker_lost(batches)
        self.wake()

    def device_failed(self, address: str) -> None:
        """Nothing runs on a worker's device; what is left there waits again.

        Nobody is to blame for that who was not running when it broke.
        """
        for batch, requests in self._take_out(address):
            self.running.release(requests, f"{batch.stimulus_id}-back")
        self.wake()

    def _take_out(self, address: str) -> list[tuple[Batch, list[Request]]]:
        """Send nothing more to a worker; return its batches, and who is in them."""
        batches = self.running.lost(address)
        for batch, _ in batches:
            self.supervision.forget(batch)
        self.supervision.worker_lost(address)
        for line in self.lines.values():
            if line.devices.pop(address, None) is not None:
                line.latency.forget(address)
        for key in [key for key in self._devices if key[0] == address]:
            del self._devices[key]
        return batches

    def enqueue(self, request: Request, line: Line) -> None:
        """Let a request wait for a batch."""
        if not line.queue.count and not line.in_flight:
            # A deployment that was idle has no claim on the time it did not use.
            line.served = max(
                line.served, min((o.served for o in self.lines.busy()), default=0.0)
            )
        # Without rows it still takes a pass; and a lane of no rows is never served.
        request.rows = max(request.rows, 1)
        if not request.attempts:
            line.batcher.arrived(request.rows, monotonic())
        self._push(request, line)

    def _push(self, request: Request, line: Line) -> None:
        if request.delayed:
            self.recovery.forget(request)
        request.lane = self._admission.lane_of(request)
        line.queue.push(request)
        self.wake()

    def _requeue(self, request: Request, line: Line) -> None:
        """Let a request wait where it belongs by now."""
        line = self.lines.holding(request, line)
        if request.waiting:
            line.queue.discard(request)
        elif request.error is not None or not self.tasks.is_parked(request.key):
            # It is about to fail, or waits for inputs first.
            return
        place = self._place(request, line)
        if place is not None:
            self._push(request, place)

    def reroute(self, name: str) -> None:
        """Let the requests of a deployment wait for the versions that answer by now.

        They keep their places.
        """
        for line in self.lines.of(name):
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

    def unassign(self, request: Request) -> None:
        """A request is not part of its batch any more."""
        if self.running.unassign(request):
            self.wake()

    def done(self, message: DoneMessage, address: str) -> None:
        """Take in what a worker says of a batch."""
        batch, struck = self.running.done(message, address)
        if batch is not None and message["broken"]:
            self.supervision.forget(batch)
            if struck:
                self.recovery.device_failed(batch, struck, message["broken"])
        elif batch is not None:
            self.supervision.answered(batch, message)
        self.wake()

    def progressed(self, batch_id: str, address: str, waits_for: str) -> None:
        """A worker says what a batch waits for, or that it has begun after that."""
        batch = self.running.batches.get(batch_id)
        if batch is not None and batch.device.name == address:
            self.supervision.progressed(batch, waits_for)
            self.wake()

    def watch(self, key: Key, deadline: float) -> None:
        """See to it that a request ends in time, whatever it waits for."""
        self.deadlines.set(key, deadline)
        if deadline < self._timer.at and not self._woken:
            self._timer.set(deadline)

    def clear(self) -> None:
        """Forget all requests and batches; what is deployed stays."""
        self.running.clear()
        self.supervision.clear()
        for line in self.lines.values():
            for request in line.queue.requests():
                line.queue.discard(request)
        self.recovery.clear()
        self.deadlines.clear()
        self._timer.cancel()

    # Deciding

    def wake(self) -> None:
        """Decide again, once all messages at hand are taken in."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._woken = False
        self._end_late()
        running = set(self.tasks.running())
        self.supervision.check(running, monotonic())
        self.running.drop_unwanted()
        self.recovery.release(monotonic())
        wake_at = math.inf
        busy = self.lines.busy()
        while busy:
            # Whoever was given the least device time chooses first.
            busy.sort(key=lambda line: line.served)
            now = monotonic()
            wake_at = math.inf
            self.chooser.begin()
            for line in busy:
                try:
                    choice = self.chooser.choose(line, running, now)
                    if isinstance(choice, Choice):
                        self._send(line, choice)
                        break
                    wake_at = min(wake_at, choice)
                except Exception as error:
                    self._give_up(line, error)
            else:
                if not self.chooser.release():
                    break
            busy = [line for line in busy if line.queue.count]
        if not busy:
            self.chooser.begin()
            self.chooser.release()
        self._timer.set(
            min(
                wake_at,
                self.recovery.delayed.next(),
                self.deadlines.next(),
                self.supervision.next(),
            )
        )

    def _end_late(self) -> None:
        late = self.deadlines.expired(monotonic())
        if late:
            try:
                self._expire(late)
            except Exception:
                logger.exception("%d requests could not be ended in time", len(late))

    def _send(self, line: Line, choice: Choice) -> None:
        batch = self.running.dispatch(line, choice.lane, choice.send)
        if batch is not None:
            self.supervision.sent(batch)
            if not line.health.admits(batch.device.name):
                line.health.try_with(batch.device.name, batch.batch_id)

    def _give_up(self, line: Line, error: Exception) -> None:
        """Nothing can be decided for a version: a user's placement fails."""
        waiting = line.queue.requests()
        logger.exception("%r cannot be served; failing who waits", line)
        for request in waiting:
            line.queue.discard(request)
        self.tasks.fail_parked([r.key for r in waiting], error, "daskinfer-give-up")
