"""How many requests at a time, and how to give way where others fill the queue.

Pure: no clock, no event loop, no Dask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from daskinfer.imap.window import Bounds
from daskinfer.status import DeploymentStatus

#: Seconds between two looks at what was learned: at first, and at the longest.
_SOONEST, _LATEST = 0.05, 5.0
#: Seconds until what was turned away is sent again: the same.
_SHORTEST, _LONGEST = 0.02, 1.0
#: Requests that are let go of later, at most.
_HELD = 4096
#: What an input weighs in the averages.
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a deployment takes at a time.

    Parameters
    ----------
    rows
        The sum, over its devices, of the batch sizes that are known as best.
    devices
        How many there are.
    max_queue
        How many requests may wait, if there is a limit.
    """

    rows: int
    devices: int
    max_queue: int | None = None

    @classmethod
    def of(
        cls, status: DeploymentStatus, version: str | None, max_queue: int | None
    ) -> Capacity:
        """Read it from a status; of the active version where ``version`` is None."""
        label = status.active_version if version is None else version
        best: Mapping[str, int] = {}
        if any(found.version == label for found in status.versions):
            best = status.version(label).best_batch_size
        serving = [worker for worker in status.workers if worker.healthy]
        rows = sum(best.get(worker.device_class or "", 1) for worker in serving)
        return cls(max(rows, 1), max(len(serving), 1), max_queue)


class Inputs:
    """What inputs are like, on average; the latest count for most.

    Examples
    --------
    >>> inputs = Inputs()
    >>> inputs.seen(rows=2, nbytes=100)
    >>> inputs.answered(nbytes=50)
    >>> inputs.rows, inputs.nbytes
    (2.0, 150.0)
    """

    def __init__(self) -> None:
        self.rows = 1.0
        self._sent = self._answer = 0.0
        self._is_new = self._is_unanswered = True

    def __repr__(self) -> str:
        return f"<Inputs of {self.rows:.1f} rows, {self.nbytes:.0f} bytes with answers>"

    @property
    def nbytes(self) -> float:
        """Bytes of one input and its result."""
        return self._sent + self._answer

    def seen(self, rows: int, nbytes: int) -> None:
        """Note one that is sent."""
        weight = 1.0 if self._is_new else _WEIGHT
        self._is_new = False
        self.rows += weight * (max(rows, 1) - self.rows)
        self._sent += weight * (nbytes - self._sent)

    def answered(self, nbytes: int) -> None:
        """Note the size of one's result."""
        weight = 1.0 if self._is_unanswered else _WEIGHT
        self._is_unanswered = False
        self._answer += weight * (nbytes - self._answer)


def bounds(
    given: int | None,
    capacity: Capacity,
    inputs: Inputs,
    batches: int,
    memory: int,
) -> Bounds:
    """How many requests there may be.

    Parameters
    ----------
    given
        What the user set; None: as many as keep the devices busy.
    capacity
        What the deployment takes.
    inputs
        What is sent.
    batches
        Batches of the best size for each device: one that it runs, one that is on its
        way, and those that wait, of which the scheduler makes a larger one if that may
        be better.
    memory
        Bytes that inputs and results may take, unless the devices would be idle.

    Examples
    --------
    >>> two_devices = Capacity(rows=64, devices=2, max_queue=300)
    >>> bounds(None, two_devices, Inputs(), batches=4, memory=2**30)
    Bounds(in_flight=256, kept=512)
    >>> bounds(10, two_devices, Inputs(), batches=4, memory=2**30)
    Bounds(in_flight=10, kept=10)
    """
    limit = math.inf if capacity.max_queue is None else capacity.max_queue
    if given is not None:
        return Bounds(int(min(given, limit)), given)
    fewest = 2 * capacity.devices
    in_flight = max(math.ceil(batches * capacity.rows / inputs.rows), fewest)
    # Results that came ahead of one that is slow keep nobody from going on.
    kept = 2 * in_flight
    if inputs.nbytes:
        kept = min(kept, max(int(memory / inputs.nbytes), fewest))
    return Bounds(int(min(in_flight, kept, limit)), kept)


def held(given: int | None, inputs: Inputs, memory: int) -> int:
    """How many requests need not be let go of as soon as their results have come.

    Letting go keeps the scheduler from sending the next batch. A list that is not long
    is through before that begins, and behind a long one it goes on as results come.

    Examples
    --------
    >>> held(None, Inputs(), memory=2**28), held(10, Inputs(), memory=2**28)
    (4096, 0)
    """
    if given is not None:
        return 0
    return min(_HELD, int(memory / max(inputs.nbytes, 1)))


class Interval:
    """Seconds until the next look: soon after a change, rarely without one.

    Examples
    --------
    >>> interval = Interval()
    >>> [interval.next(changed) for changed in (True, False, False, True)]
    [0.05, 0.1, 0.2, 0.05]
    """

    def __init__(self) -> None:
        self.seconds = _SOONEST

    def __repr__(self) -> str:
        return f"<Interval {self.seconds:g} s>"

    def next(self, changed: bool) -> float:
        """How long to wait, after it was seen whether something has changed."""
        self.seconds = _SOONEST if changed else min(2 * self.seconds, _LATEST)
        return self.seconds


class Backoff:
    """When to send again what was turned away, and how much of it at once.

    One at first, ever later while that is turned away too, and twice as many each
    time that none is: slow start, as in TCP (Jacobson, 1988).

    Attributes
    ----------
    seconds
        To wait before the next attempt.
    count
        How many to send then.

    Examples
    --------
    >>> backoff = Backoff()
    >>> backoff.tried(refused=True)
    >>> backoff.seconds, backoff.count
    (0.04, 1)
    >>> backoff.tried(refused=False)
    >>> backoff.seconds, backoff.count
    (0.02, 2)
    """

    def __init__(self) -> None:
        self.seconds = _SHORTEST
        self.count = 1

    def __repr__(self) -> str:
        return f"<Backoff {self.count} in {self.seconds:g} s>"

    def tried(self, refused: bool) -> None:
        """Note whether any of the last ones was turned away again."""
        if refused:
            self.seconds, self.count = min(2 * self.seconds, _LONGEST), 1
        else:
            self.seconds, self.count = max(self.seconds / 2, _SHORTEST), 2 * self.count
