"""Which requests may share a forward pass, and which devices may run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from scheduler_plugins.line import LaneKey

if TYPE_CHECKING:
    from scheduler_plugins.affinity import Affinity
    from scheduler_plugins.constraint import Constraint
    from scheduler_plugins.line import Line
    from scheduler_plugins.load import DeviceLoad
    from scheduler_plugins.queueing import Lane
    from scheduler_plugins.request import Request
    from scheduler_plugins.taskstate import TaskStates

#: Moving inputs pays for a lane of its own from this many seconds on.
_COSTLY_TRANSFER = 0.002


class Admission:
    """Sorts requests into lanes, and finds the devices that a lane may use.

    Parameters
    ----------
    tasks
        Knows where inputs are and what workers have.
    affinity
        Knows where results are.
    """

    def __init__(self, tasks: TaskStates, affinity: Affinity) -> None:
        self._tasks = tasks
        self._affinity = affinity

    def __repr__(self) -> str:
        return f"<Admission by {self._tasks!r}>"

    def lane_of(self, request: Request, line: Line) -> LaneKey:
        """Who may share a pass with a request."""
        home = None
        if request.has_dependencies and request.group is None:
            costly = _COSTLY_TRANSFER * self._tasks.bandwidth
            home = self._tasks.home(request.key, costly)
        return LaneKey(
            request.signature,
            cast("Constraint", request.constraint),
            home,
            request.group,
            request.tried,
            self._affinity.holder(request, line),
        )

    def devices(
        self, lane: Lane, ready: list[DeviceLoad], resting: list[DeviceLoad]
    ) -> list[DeviceLoad]:
        """The devices that a lane may use; where it has failed only if no others.

        Rather than go there, it goes to one that is ``resting``.
        """
        key = cast(LaneKey, lane.key)
        for devices in (ready, resting) if key.tried else ():
            fresh = [device for device in devices if device.name not in key.tried]
            if allowed := self._satisfying(key.constraint, fresh):
                return allowed
        return self._satisfying(key.constraint, ready)

    def workers(self, lane: Lane, addresses: Iterable[str]) -> list[str]:
        """The workers that a lane may go to; where it has failed only if no others."""
        key, addresses = cast(LaneKey, lane.key), list(addresses)
        fresh = [address for address in addresses if address not in key.tried]
        return self._admitting(key.constraint, fresh) or self._admitting(
            key.constraint, addresses
        )

    def allowed(self, request: Request, addresses: list[str]) -> list[str]:
        """The workers that a request may go to, wherever it has failed."""
        return self._admitting(cast("Constraint", request.constraint), addresses)

    def _satisfying(
        self, constraint: Constraint, ready: list[DeviceLoad]
    ) -> list[DeviceLoad]:
        if constraint.anywhere:
            return ready
        allowed = set(self._admitting(constraint, [device.name for device in ready]))
        return [device for device in ready if device.name in allowed]

    def _admitting(self, constraint: Constraint, addresses: list[str]) -> list[str]:
        if constraint.anywhere:
            return addresses
        allowed = [a for a in addresses if self._tasks.admits(constraint, a)]
        if allowed or not constraint.preferred_only:
            return allowed
        return [a for a in addresses if self._tasks.declares(a, constraint.resources)]

    def transfer(self, head: Request) -> Callable[[DeviceLoad], float] | None:
        """Seconds that moving a request's inputs to a device takes; None: no time."""
        if not head.has_dependencies:
            return None
        bandwidth = self._tasks.bandwidth
        return lambda device: (
            self._tasks.missing_bytes(head.key, device.name) / bandwidth
        )
