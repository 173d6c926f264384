"""Why what waits is not served, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from daskinfer.exceptions import UnknownDeployment

if TYPE_CHECKING:
    from scheduler_plugins.constraint import Constraint
    from scheduler_plugins.line import LaneKey, Line
    from scheduler_plugins.queueing import Request
    from scheduler_plugins.registry import Registry
    from scheduler_plugins.taskstate import TaskStates


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

    def problem(self, line: Line, request: Request | None = None) -> str | None:
        """Why what waits for a version is not served, or None if it is.

        Parameters
        ----------
        line
            The version.
        request
            Who waits; None: the one whose turn it is.
        """
        try:
            problem = self._registry.problem(line.name, line.version)
        except UnknownDeployment:
            return None
        running = set(self._tasks.running())
        if running and not self._registry.workers:
            return "no worker has said yet what devices it has"
        if problem is not None or not line.queue.count:
            return problem
        ready = [address for address in line.devices if address in running]
        if not ready:
            return "every ready worker is paused or closing"
        constraints = [
            cast("Constraint", request.constraint)
            if request is not None
            else cast("LaneKey", lane.key).constraint
            for lane in line.queue.oldest(1)
        ]
        for constraint in constraints:
            if not any(self._tasks.admits(constraint, address) for address in ready):
                return self._unsatisfied(constraint)
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
