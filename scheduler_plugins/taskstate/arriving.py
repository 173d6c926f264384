"""How requests come: tasks made or caught, and parked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer.exceptions import NotServable
from daskinfer.handle import Model
from scheduler_plugins.constraint import Constraint
from scheduler_plugins.taskstate.facts import Facts, FastTask

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from daskinfer import protocol

#: No worker has this address, so a task restricted to it waits in ``no-worker``.
PARKED_AT = "tcp://daskinfer-parked:0"

PARKED = frozenset({PARKED_AT})


@dataclass(slots=True)
class NewTask:
    """What :meth:`TaskStates.create` needs to know of one request."""

    key: Key
    model: Model
    payload: protocol.Payload
    dependencies: list[Key]
    priority: float
    retries: int


class Arriving(Facts):
    """Makes tasks of requests, and keeps Dask from placing them.

    Parameters
    ----------
    scheduler
        The scheduler whose tasks these are.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._sequence = 0

    def park(self, key: Key) -> Constraint:
        """Keep Dask from placing a task; return where the user wanted it.

        Raises
        ------
        NotServable
            If the task asks to be an actor: a request has no state to keep.
        """
        ts = self.scheduler.tasks[key]
        asked = Constraint(
            workers=_asked_workers(ts),
            hosts=frozenset(ts.host_restrictions) if ts.host_restrictions else None,
            resources=tuple(sorted((ts.resource_restrictions or {}).items())),
            preferred_only=bool(ts.loose_restrictions),
        )
        is_actor = bool(ts.actor)
        ts.worker_restrictions = set(PARKED)
        ts.host_restrictions = None
        # A preference would let Dask place the task as soon as nothing satisfies it.
        ts.loose_restrictions = False
        ts.resource_restrictions = None
        ts.actor = False
        if is_actor:
            raise NotServable("a deployed model cannot be an actor: leave out actor=")
        return asked

    def create(
        self, client: str, new: Sequence[NewTask], stimulus_id: str
    ) -> tuple[list[Key], list[Key]]:
        """Make parked tasks for requests that came by the fast path.

        Returns
        -------
        created, wanted
            Keys of tasks made new, and of all that are to be started. A key that
            exists is only wanted by one more client. Requests whose inputs do not
            exist any more are in neither; the client is told of those.
        """
        s = self.scheduler
        created: list[Key] = []
        lost: list[Key] = []
        wanted: list[Key] = []
        for request in new:
            if any(dep not in s.tasks for dep in request.dependencies):
                lost.append(request.key)
                continue
            wanted.append(request.key)
            ts = s.tasks.get(request.key)
            if ts is None:
                ts = s.new_task(request.key, None, "released")
            elif ts.run_spec is not None:
                continue
            self._describe(ts, request)
            created.append(request.key)
        if lost:
            s.report(
                {"op": "cancelled-keys", "keys": lost, "reason": "lost dependencies"},
                client=client,
            )
        self._join_span([s.tasks[key] for key in created])
        s.client_desires_keys(wanted, client)
        return created, wanted

    def start(self, keys: Sequence[Key], stimulus_id: str) -> None:
        """Let tasks that were just created wait for their inputs, then park."""
        tasks = self.scheduler.tasks
        # Dask works recommendations off from the end.
        recommendations: dict[Key, Any] = {}
        for key in reversed(keys):
            ts = tasks[key]
            blamed = next(
                (d.exception_blame for d in ts.dependencies if d.exception_blame), None
            )
            if blamed is not None:
                ts.exception_blame = blamed
                recommendations[key] = "erred"
            elif ts.state == "released":
                recommendations[key] = "waiting"
        self.scheduler.transitions(recommendations, stimulus_id)

    def _describe(self, ts: TaskState, request: NewTask) -> None:
        self._sequence += 1
        spec: Any = FastTask(
            request.key,
            request.model,
            request.payload,
            frozenset(request.dependencies),
        )
        ts.run_spec = spec
        for dependency in request.dependencies:
            ts.add_dependency(self.scheduler.tasks[dependency])
        ts.priority = (-request.priority, self.scheduler.generation, self._sequence)
        ts.retries = request.retries
        ts.worker_restrictions = set(PARKED)

    def _join_span(self, tasks: list[TaskState]) -> None:
        spans = self.scheduler.extensions.get("spans")
        fresh = [ts for ts in tasks if ts.group.span_id is None]
        if spans is not None and fresh:
            spans.observe_tasks(fresh, span_metadata={"collections": []}, code=())


def _asked_workers(ts: TaskState) -> frozenset[str] | None:
    if not ts.worker_restrictions or ts.worker_restrictions == PARKED:
        return None
    return frozenset(ts.worker_restrictions)
