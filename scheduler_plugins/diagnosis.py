"""Why what waits is not served, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from distributed.metrics import monotonic

from daskinfer.exceptions import UnknownDeployment
from daskinfer.wording import counted
from scheduler_plugins.breaker import BreakerState

if TYPE_CHECKING:
    from scheduler_plugins.constraint import Constraint
    from scheduler_plugins.line import LaneKey, Line
    from scheduler_plugins.registry import Registry
    from scheduler_plugins.taskstate import TaskStates


def unfitness(line: Line, address: str, now: float) -> str | None:
    """Why a worker that is ready is given no requests, or None if it is."""
    device = line.devices.get(address)
    if device is not None and device.stuck:
        late = next(iter(device.stuck.values()))
        return f"it gets nothing more until it answers: {late}"
    state, reason = line.health.state(address, now)
    if state is BreakerState.CLOSED:
        return None
    if state is BreakerState.HALF_OPEN:
        return f"it is tried with one request before it gets more: {reason}"
    tried = max(line.health.breakers[address].next() - now, 0)
    return f"it gets no requests: {reason}; it is tried again in {tried:.2g} s"


class Diagnosis:
    """Explains what stands between requests and a device.

    Parameters
    ----------
    registry
        What is deployed, and where.
    tasks
        Knows the workers.
    """

    def __init__(self, registry: Registry, tasks: TaskStates) -> None:
        self._registry = registry
        self._tasks = tasks

    def problem(self, line: Line, constraint: Constraint | None = None) -> str | None:
        """Why what waits for a version is not served, or None if it is.

        Parameters
        ----------
        line
            The version.
        constraint
            Where requests may run; None: those whose turn it is.
        """
        try:
            problem = self._registry.problem(line.name, line.version)
        except UnknownDeployment:
            return None
        running = set(self._tasks.running())
        if running and not self._registry.workers:
            are = "is" if len(running) == 1 else "are"
            return (
                f"{counted(len(running), 'worker')} {are} starting, and {are} yet to "
                "say what devices there are"
            )
        if problem is not None or not line.queue.count:
            able = self._registry.can_answer(line.name, line.version)
            # What is cold is loaded for whoever asks.
            return problem if line.queue.count or not able else None
        ready = [address for address in line.devices if address in running]
        if not ready:
            return "every ready worker is paused or closing"
        if constraint is None:
            (lane,) = line.queue.oldest(1)[:1]
            constraint = cast("LaneKey", lane.key).constraint
        allowed = [a for a in ready if self._tasks.admits(constraint, a)]
        if not allowed:
            return self._unsatisfied(constraint)
        now = monotonic()
        unfit = {address: unfitness(line, address, now) for address in allowed}
        if all(unfit.values()):
            told = "; ".join(f"{address}: {why}" for address, why in unfit.items())
            return f"no worker is fit: {told}"
        return None

    def _unsatisfied(self, constraint: Constraint) -> str:
        told = [f"requests ask for {constraint}, which no ready worker satisfies"]
        for resource, _ in constraint.resources:
            declared = ", ".join(
                f"{address} has {amount:g}"
                for address, amount in sorted(self._tasks.declared(resource).items())
            )
            told.append(f"{resource}: {declared or 'no worker declares it'}")
        return "; ".join(told)
