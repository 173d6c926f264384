"""Sends what waits to the devices that want it, and takes the answers in.

The policies decide (:mod:`~scheduler_plugins.choosing` asks them); this shell enacts
what they say after every event, and arms one timer for their next wish.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import monotonic

from daskinfer.logs import Log
from daskinfer.protocol import PLAIN
from scheduler_plugins.admission import Admission
from scheduler_plugins.affinity import Affinity
from scheduler_plugins.choosing import Choice, Chooser
from scheduler_plugins.closing import Closing
from scheduler_plugins.deadlines import Deadlines
from scheduler_plugins.fitness import Fitness
from scheduler_plugins.health import Suspicion
from scheduler_plugins.lifecycle import EXPIRED
from scheduler_plugins.line import Batch, Line
from scheduler_plugins.lines import Lines
from scheduler_plugins.load import Link
from scheduler_plugins.outcomes import PLACEMENT
from scheduler_plugins.request import Request
from scheduler_plugins.running import Running
from scheduler_plugins.starving import Starvation
from scheduler_plugins.streams import Streams
from scheduler_plugins.supervision import Supervision
from scheduler_plugins.timer import Timer
from scheduler_plugins.waiting import Waiting

if TYPE_CHECKING:
    from daskinfer.protocol import DoneMessage, EndedMessage, SlotsMessage
    from scheduler_plugins.taskstate import TaskStates

logger = Log("dispatcher")


_GIVE_UP = "daskinfer-give-up"


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
    swap
        Called with the versions that have requests waiting, and the time: has those
        loaded that are cold. Returns when to ask again.
    left
        Called when there were streams that nobody wants any more: with the last one,
        a version that is not served any more can go.

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
        swap: Callable[[list[Line], float], float] = lambda lines, now: math.inf,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self.tasks = tasks
        self.link = Link()
        self.lines = Lines(self.link, priority_age)
        self.statistics = self.lines.statistics
        self.running = Running(tasks, send, self.link)
        self.deadlines: Deadlines[Key] = Deadlines()
        self.affinity = Affinity(self.link)
        self.admission = Admission(tasks, self.affinity)
        self.waiting = Waiting(tasks, self.lines, self.admission, place, self.wake)
        self.recovery = self.waiting.recovery
        self.streams = Streams(tasks, send, self.recovery)
        self.fitness = Fitness(self.lines.values(), self.admission, self.link)
        self.supervision = Supervision(
            self.lines.values(),
            self.running,
            self.recovery,
            self.admission,
            self.fitness,
            self.link,
            suspicion,
            hung,
        )
        self._starvation = Starvation(report, warn_after)
        self.closing = Closing()
        self.chooser = Chooser(
            self.admission, self.fitness, self._starvation, self.link, self.affinity
        )
        self._expire = expire
        self._swap = swap
        self._left = left
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
        return self.waiting.leave(line)

    def forget(self, name: str) -> None:
        """Drop the counters of a deployment."""
        self.lines.forget(name)
        self.affinity.residency.forget(name)

    def device_ready(
        self,
        name: str,
        version: str,
        address: str,
        device_class: str,
        timings: Iterable[tuple[int, float]],
        doubt: str | None = None,
        kind: str = PLAIN,
    ) -> None:
        """A worker has loaded a version, found out its kind, and measured it.

        With a ``doubt``, it is tried with one request before it is given more.
        """
        line = self.lines.get((name, version))
        if line is None:
            return
        line.kind = kind or line.kind
        line.devices[address] = self.lines.device(address, device_class)
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
        self.streams.lost(address, beside=bool(batches), expected=expected)
        self.affinity.worker_lost(address)
        for counts in self.statistics.values():
            counts.workers.pop(address, None)
        for line in self.lines.values():
            line.pace.forget(address)
        if not expected:
            self.recovery.worker_lost(batches)
        self.wake()

    def device_failed(self, address: str, reason: str = "") -> None:
        """Nothing runs on a worker's device; what is left there waits again.

        Nobody is to blame for that who was not running when it broke.
        """
        for batch, requests in self._take_out(address):
            self.recovery.sent_back(batch, requests)
            self.running.release(requests, f"{batch.stimulus_id}-back")
        self.streams.device_failed(address, reason)
        self.wake()

    def _take_out(self, address: str) -> list[tuple[Batch, list[Request]]]:
        """Send nothing more to a worker; return its batches, and who is in them."""
        batches = self.running.lost(address)
        for batch, _ in batches:
            self.supervision.forget(batch)
        self.supervision.worker_lost(address)
        self.lines.forget_worker(address)
        return batches

    def unassign(self, request: Request) -> None:
        """A request is not part of its batch any more."""
        if self.streams.unassign(request) or self.running.unassign(request):
            self.wake()

    def done(self, message: DoneMessage, address: str) -> None:
        """Take in what a worker says of a batch."""
        known = self.running.batches.get(message["batch"])
        requests = {} if known is None else dict(known.requests)
        batch, struck = self.running.done(message, address)
        if batch is not None:
            self.streams.begun(batch, requests, message)
        else:
            self.streams.refuse(message["batch"], address, message["streaming"])
        if batch is not None and message["kept"]:
            self.cached(batch.line.name, address, message["kept"], b"")
        if batch is not None and message["broken"]:
            self.supervision.forget(batch)
            if struck:
                self.recovery.device_failed(batch, struck, message["broken"])
        elif batch is not None:
            self.supervision.answered(batch, message)
        self.wake()

    def stream_ended(self, message: EndedMessage, address: str) -> None:
        """Take in what a worker says of streams that have ended."""
        self.streams.ended(message, address)
        self.wake()

    def paced(self, message: SlotsMessage, address: str) -> None:
        """Take in what a worker says of how a version advances step by step."""
        line = self.lines.get((message["name"], message["version"]))
        if line is not None:
            line.pace.told(address, message["slots"], message["seconds"])
        self.wake()

    def progressed(self, batch_id: str, address: str, waits_for: str) -> None:
        """A worker says what a batch waits for, or that it has begun after that."""
        batch = self.running.batches.get(batch_id)
        if batch is not None and batch.device.name == address:
            self.supervision.progressed(batch, waits_for)
            self.wake()

    def cached(self, name: str, address: str, added: bytes, dropped: bytes) -> None:
        """Take in what a worker has in its cache; who waits for that goes there."""
        lines = self.lines.of(name)
        if lines:  # else it was undeployed meanwhile
            for request in self.affinity.reported(name, address, added, dropped):
                self.waiting.requeue(request, lines[0])

    def not_found(self, batch_id: str, address: str, dropped: bytes) -> None:
        """A worker has to compute what was expected to be in its cache."""
        batch = self.running.batches.get(batch_id)
        if batch is not None and batch.device.name == address:
            self.affinity.reported(batch.line.name, address, b"", dropped)
            self.running.not_found(batch)
            self.supervision.not_found(batch)
            self.wake()

    def workers(self) -> set[str]:
        """Workers that have something under way."""
        return self.running.workers() | self.streams.live.workers()

    def watch(self, key: Key, deadline: float) -> None:
        """See to it that a request ends in time, whatever it waits for."""
        self.deadlines.set(key, deadline)
        if deadline < self._timer.at and not self._woken:
            self._timer.set(deadline)

    def clear(self) -> None:
        """Forget all requests and batches; what is deployed stays."""
        self.running.clear()
        self.streams.clear()
        self.supervision.clear()
        for line in self.lines.values():
            for request in line.queue.requests():
                line.queue.discard(request)
        self.recovery.clear()
        self.affinity.clear()
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
        running -= self.closing.named(monotonic())
        self.running.drop_unwanted()
        if self.streams.drop_unwanted():
            asyncio.get_running_loop().call_soon(self._left)
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
                self._swap(busy, monotonic()),
                self.recovery.delayed.next(),
                self.deadlines.next(),
                self.supervision.next(),
                self.closing.next(),
            )
        )

    def _end_late(self) -> None:
        late = self.deadlines.expired(monotonic())
        if late:
            try:
                self._expire(late)
            except Exception:
                logger.exception(
                    "%d requests could not be ended in time",
                    len(late),
                    stimulus_id=EXPIRED,
                )

    def _send(self, line: Line, choice: Choice) -> None:
        batch = self.running.dispatch(line, choice.lane, choice.send)
        if batch is not None:
            self.supervision.sent(batch)
            if not line.health.admits(batch.device.name):
                line.health.try_with(batch.device.name, batch.batch_id)

    def _give_up(self, line: Line, error: Exception) -> None:
        """Nothing can be decided for a version: a user's placement fails."""
        waiting = line.queue.requests()
        logger.exception(
            "%r cannot be served; failing who waits",
            line,
            deployment=line.name,
            version=line.version,
            stimulus_id=_GIVE_UP,
        )
        for request in waiting:
            line.queue.discard(request)
            request.cause = PLACEMENT
        self.tasks.fail_parked([r.key for r in waiting], error, _GIVE_UP)
