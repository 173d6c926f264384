"""Which of the devices that could take a batch gets it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar
from weakref import WeakKeyDictionary

from scheduler_plugins.load import DeviceLoad

__all__ = ["Candidate", "LeastLoaded", "Placement", "RoundRobin", "resolve"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A batch that could leave now, and the device that would run it.

    Parameters
    ----------
    device : DeviceLoad
        Where it would run.
    rows : int
        How many rows the device would be given.
    probe : bool
        Whether the size is larger than any measured on this class of device.
    starts, finishes : float
        When it would start and end, in seconds on the scheduler's monotonic clock.
    transfer : float
        Seconds that moving its inputs there takes; `starts` has them in it.
    """

    device: DeviceLoad
    rows: int
    probe: bool
    starts: float
    finishes: float
    transfer: float


class Placement(ABC):
    """Chooses among the devices that could take a batch now.

    Derive from it, and name the class as ``"package.module.Class"`` in
    ``deploy(placement=...)``; it is built without arguments, in the scheduler process,
    once per deployment version.
    """

    #: Whether a batch may stay in the queue to wait for a faster device that is busy.
    waits_for_faster: ClassVar[bool] = False

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], now: float) -> Candidate:
        """Choose one of `candidates`, of which there is at least one.

        Parameters
        ----------
        candidates : sequence of Candidate
            In the order of the devices.
        now : float
            Monotonic time in seconds.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class LeastLoaded(Placement):
    """The device that would finish the batch first.

    Ties go to the device that was sent nothing for the longest time. Unequal devices
    are told apart by what the batch takes there, so a fast busy one may be preferred
    to a slow idle one.
    """

    waits_for_faster = True

    def choose(self, candidates: Sequence[Candidate], now: float) -> Candidate:
        """Choose the earliest finish; see :meth:`Placement.choose`."""
        first = min(candidate.finishes for candidate in candidates)
        tied = (c for c in candidates if c.finishes <= first + 1e-9)
        return min(tied, key=lambda candidate: candidate.device.last_sent)


class RoundRobin(Placement):
    """One device after the other, whatever each of them takes."""

    def __init__(self) -> None:
        self._turns: WeakKeyDictionary[DeviceLoad, int] = WeakKeyDictionary()
        self._next_turn = count(1)

    def choose(self, candidates: Sequence[Candidate], now: float) -> Candidate:
        """Choose the longest passed over; see :meth:`Placement.choose`."""
        chosen = min(candidates, key=lambda c: self._turns.get(c.device, 0))
        self._turns[chosen.device] = next(self._next_turn)
        return chosen


_NAMED: dict[str, type[Placement]] = {
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}


def resolve(spec: str | type[Placement] | Placement) -> Placement:
    """Make a placement of what a user wrote.

    Parameters
    ----------
    spec : str, type or Placement
        ``"least-loaded"``, ``"round-robin"``, ``"package.module.Class"``, a class or
        an instance.

    Raises
    ------
    ValueError
        The name is unknown, or cannot be imported.
    TypeError
        What it names is no :class:`Placement`.

    Examples
    --------
    >>> resolve("round-robin")
    <RoundRobin>
    >>> resolve("scheduler_plugins.placement.LeastLoaded")
    <LeastLoaded>
    >>> resolve("random")
    Traceback (most recent call last):
        ...
    ValueError: unknown placement 'random': expected 'least-loaded', 'round-robin' \
or the path of a class, such as 'package.module.Class'
    """
    if isinstance(spec, Placement):
        return spec
    found: object = spec
    if isinstance(spec, str):
        found = _NAMED.get(spec) or _load(spec)
    if not (isinstance(found, type) and issubclass(found, Placement)):
        raise TypeError(
            f"placement must be a subclass of {Placement.__module__}.Placement, "
            f"got {spec!r}"
        )
    return found()


def _load(path: str) -> object:
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        expected = ", ".join(map(repr, _NAMED))
        raise ValueError(
            f"unknown placement {path!r}: expected {expected} or the path of a class, "
            "such as 'package.module.Class'"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"placement {path!r} cannot be imported by the scheduler: {error}"
        ) from error
