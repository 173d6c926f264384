"""Watches over the devices: which are late, and what is to be done about it.

What is late, and who is to blame, is decided elsewhere
(:mod:`~scheduler_plugins.health`); this shell keeps the time of each batch and enacts
what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from distributed.metrics import monotonic

from daskinfer.failure import type_of
from daskinfer.logs import Log
from daskinfer.protocol import CACHE, DEVICE, INPUTS
from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.deadlines import Deadlines

if TYPE_CHECKING:
    from daskinfer.protocol import DoneMessage
    from scheduler_plugins.admission import Admission
    from scheduler_plugins.fitness import Fitness
    from scheduler_plugins.health import Suspicion
    from scheduler_plugins.line import Batch, Line
    from scheduler_plugins.load import DeviceLoad, Link
    from scheduler_plugins.recovery import Recovery
    from scheduler_plugins.running import Running

logger = Log("supervision")

_WAITS = {DEVICE: "a task that holds the device", CACHE: "its cache to be read"}


class Supervision:
    """Gives up batches that take too long, and finds out which devices are fit.

    Parameters
    ----------
    lines
        All versions in service.
    running
        The batches under way.
    recovery
        Gives requests their next attempt.
    admission
        Knows which devices a request may use.
    fitness
        Is told which devices are stuck, and may serve what they had.
    link
        What messages take.
    suspicion
        From when on a batch tells against its device.
    hung
        Called with the address of a worker whose device hangs, and how that is known.

    Notes
    -----
    A device runs one batch after the other. So one that does not end stands in the way
    of everything that was sent behind it, of all deployments, and nothing is known of
    the device until it says something again.
    """

    def __init__(
        self,
        lines: Collection[Line],
        running: Running,
        recovery: Recovery,
        admission: Admission,
        fitness: Fitness,
        link: Link,
        suspicion: Suspicion,
        hung: Callable[[str, str], None],
    ) -> None:
        self._lines = lines
        self._running = running
        self._recovery = recovery
        self._admission = admission
        self._fitness = fitness
        self._link = link
        self._suspicion = suspicion
        self._hung = hung
        self.watched: Deadlines[str] = Deadlines()

    def __repr__(self) -> str:
        return f"<Supervision batches: {len(self.watched)} {self._fitness!r}>"

    # What happens

    def sent(self, batch: Batch) -> None:
        """A batch has left."""
        self.watched.set(batch.batch_id, batch.sent_at + self._patience(batch))

    def progressed(self, batch: Batch, waits_for: str) -> None:
        """A batch waits for inputs or for a task that has the device, or not any more.

        What it waits for is nobody's fault: only the time it runs is limited.
        """
        device, now = batch.device, monotonic()
        batch.attempt.waits_for(now, waits_for)
        if waits_for:
            device.waits(batch.batch_id, waits_for, now)
            # Should it decide about a worker, another one may be sooner.
            batch.line.health.undecided(device.name, batch.batch_id)
        else:
            device.begun(batch.batch_id, now, self._link)
        self.watched.set(batch.batch_id, now + self._patience(batch))

    def not_found(self, batch: Batch) -> None:
        """A batch waits for its turn on the device, not in a cache any more."""
        self.watched.set(batch.batch_id, monotonic() + self._patience(batch))

    def answered(self, batch: Batch, message: DoneMessage) -> None:
        """A worker has said something of a batch."""
        self.watched.discard(batch.batch_id)
        now = monotonic()
        device, health = batch.device, batch.line.health
        address = device.name
        if device.stuck.pop(batch.batch_id, None) is not None:
            health.undecided(address, batch.batch_id)
            if not device.stuck:
                self._came_back(device, now, message["stimulus_id"])
            return
        # What was found in a cache tells nothing of the device.
        if len(message["keys"]) > len(message["cached"]) or message["streaming"]:
            changed = health.answered(address, batch.batch_id, retry=batch.retry)
        elif message["failed"] or message["missing"]:
            failed = len(message["failed"]) + len(message["missing"])
            reason = (
                f"all of its latest batches failed ({_why_failed(message)}), which "
                "those of other workers do not"
            )
            rows = max(batch.rows, failed)
            predicted = batch.line.latency.seconds(address, device.device_class, rows)
            changed = health.refused(
                address,
                batch.batch_id,
                now,
                batch.sent_at + predicted,
                reason,
                retry=batch.retry,
            )
        else:
            health.undecided(address, batch.batch_id)
            return
        if changed is BreakerState.OPEN:
            self._tell_opened(batch.line, address, now, message["stimulus_id"])
            for failure in message["failed"].values():
                told = address, batch.batch_id, failure["exception_text"]
                logger.debug("What failed on %s in batch %s: %s", *told)
        elif changed is BreakerState.CLOSED:
            logger.info(
                "%s serves %r again: its trial succeeded",
                *(address, batch.line.name),
                deployment=batch.line.name,
                version=batch.line.version,
                stimulus_id=message["stimulus_id"],
                limited=False,
            )

    def forget(self, batch: Batch) -> None:
        """No answer of a batch will come."""
        self.watched.discard(batch.batch_id)

    def worker_lost(self, address: str) -> None:
        """A worker is gone, and what is held against it."""
        self._fitness.stuck = [
            device for device in self._fitness.stuck if device.name != address
        ]
        for line in self._lines:
            line.health.forget(address)

    def clear(self) -> None:
        """Forget all batches."""
        self.watched.clear()
        for device in self._fitness.stuck:
            device.stuck.clear()
        self._fitness.stuck.clear()
        for line in self._lines:
            line.health.clear()

    # What is late

    def next(self) -> float:
        """When to look again."""
        return self.watched.next()

    def check(self, running: Collection[str], now: float) -> None:
        """Give up what is past its time, and move what stands behind it."""
        for batch_id in self.watched.expired(now):
            batch = self._running.batches.get(batch_id)
            if batch is not None:
                self._check_batch(batch, running, now)
        for device in self._fitness.stuck:
            self._move(device, running)

    def _check_batch(self, batch: Batch, running: Collection[str], now: float) -> None:
        if batch.overdue:
            passed = f"{self._suspicion.hung_after:g} s after it was given up"
            reason = f"batch {batch.batch_id} of {batch.line.name!r} runs on {passed}"
            self._hung(batch.device.name, reason)
            return
        waits_since = batch.waits_since
        limit = batch.line.batch_timeout if waits_since is None else None
        started = self._started(batch) if waits_since is None else waits_since
        if started is None:
            self.watched.set(batch.batch_id, now + self._patience(batch))
            return
        if limit is not None and now >= started + limit:
            self._time_out(batch, limit, now)
            return
        again = math.inf if limit is None else started + limit
        suspect_at = started + self._suspicion.limit(self._predicted(batch))
        if now < suspect_at:
            again = min(again, suspect_at)
        elif batch.waits_for == INPUTS:
            # The device is free for others, and who holds the inputs may be late.
            self._move_batch(batch, running)
            again = now + suspect_at - started
        elif batch.batch_id not in batch.device.stuck:
            about = f"batch {batch.batch_id} of {batch.line.name!r}"
            passed = f"{now - started:.3g} s"
            reason = (
                f"it has not answered {about} for {passed}, where "
                f"{self._predicted(batch):.3g} s were expected"
                if waits_since is None
                else f"{about} has waited there for {passed} for "
                f"{_WAITS[batch.waits_for]}"
            )
            logger.warning(
                "%s is suspect: %s. It gets nothing more until it answers; what it has "
                "is run on other workers, if there are any",
                batch.device.name,
                reason,
                deployment=batch.line.name,
                version=batch.line.version,
                stimulus_id=batch.stimulus_id,
                limited=False,
            )
            self._note_stuck(batch, reason)
        if again < math.inf:
            self.watched.set(batch.batch_id, again)

    def _time_out(self, batch: Batch, limit: float, now: float) -> None:
        address, line = batch.device.name, batch.line
        reason = (
            f"batch {batch.batch_id} of {line.name!r} ran for longer than {limit:g} s"
        )
        self._note_stuck(batch, reason)
        batch.overdue = True
        if self._suspicion.hung_after < math.inf:
            self.watched.set(batch.batch_id, now + self._suspicion.hung_after)
        if line.health.open(address, now, reason):
            self._tell_opened(line, address, now, batch.stimulus_id)
        requests = self._running.give_up(batch, list(batch.requests.values()))
        self._recovery.timed_out(batch, requests)

    def _note_stuck(self, batch: Batch, reason: str) -> None:
        device = batch.device
        if not device.stuck:
            self._fitness.stuck.append(device)
        device.stuck.setdefault(batch.batch_id, reason)

    def _came_back(self, device: DeviceLoad, now: float, stimulus_id: str) -> None:
        self._fitness.stuck = [
            other for other in self._fitness.stuck if other.name != device.name
        ]
        logger.info(
            "%s answers again", device.name, stimulus_id=stimulus_id, limited=False
        )
        for line in self._lines:
            if device.name in line.devices:
                line.health.doubt(device.name, now, "it was late")

    def _move(self, device: DeviceLoad, running: Collection[str]) -> None:
        """Have requests of a stuck device run elsewhere."""
        for batch in list(self._running.batches.values()):
            if batch.device.name == device.name and self._move_batch(batch, running):
                # They must not come back while the worker may still have results.
                about = f"it drops batch {batch.batch_id}"
                device.stuck.setdefault(batch.batch_id, about)

    def _move_batch(self, batch: Batch, running: Collection[str]) -> bool:
        """Have requests of a batch run on another device; tell whether there were any.

        Those that run do so once; those that have not begun, each time.
        """
        address, has_begun = batch.device.name, batch.is_running
        others = self._fitness.others(batch.line, running)
        others = [other for other in others if other != address]
        moving = [
            request
            for request in batch.requests.values()
            if not (has_begun and request.hedged)
            and self._admission.allowed(request, others)
        ]
        if not moving:
            return False
        for request in moving:
            request.hedged = request.hedged or has_begun
            request.tried |= {address}
        if has_begun:
            self._running.give_up(batch, moving)
        else:
            self._running.recall(batch, moving)
        self._recovery.moved(batch, moving)
        return True

    # Times

    def _started(self, batch: Batch) -> float | None:
        """When a batch began to run, as far as is known; None if it has not."""
        device, flight = batch.device, batch.device.running
        if flight is None or flight.batch_id != batch.batch_id:
            return None
        if flight.begun_at is not None:
            return flight.begun_at
        return max(device.free_at, batch.sent_at + self._link.outbound)

    def _predicted(self, batch: Batch) -> float:
        kind = batch.device.device_class
        return batch.line.latency.seconds(batch.device.name, kind, max(batch.rows, 1))

    def _patience(self, batch: Batch) -> float:
        """Seconds on the device that no batch is asked about before."""
        limit = batch.line.batch_timeout
        suspect = self._suspicion.limit(self._predicted(batch))
        return suspect if limit is None else min(suspect, limit)

    def _tell_opened(
        self, line: Line, address: str, now: float, stimulus_id: str
    ) -> None:
        line.figures.measures.openings += 1
        breaker = line.health.breakers[address]
        logger.warning(
            "%s gets no requests for %r for %.3g s: %s",
            address,
            line.name,
            breaker.next() - now,
            breaker.reason,
            deployment=line.name,
            version=line.version,
            stimulus_id=stimulus_id,
            limited=False,
        )


def _why_failed(message: DoneMessage) -> str:
    for failure in message["failed"].values():
        return type_of(failure)
    return "their inputs could not be fetched"
