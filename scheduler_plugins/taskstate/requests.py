"""What is changed in the scheduler's state: the life of a request's task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer.exceptions import NotServable
from daskinfer.failure import dump_failure
from daskinfer.handle import Model
from scheduler_plugins.answers import Answers
from scheduler_plugins.constraint import Constraint
from scheduler_plugins.taskstate import guards
from scheduler_plugins.taskstate.changes import Changes
from scheduler_plugins.taskstate.facts import Facts, FastTask

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from daskinfer import protocol

#: No worker has this address, so a task restricted to it waits in ``no-worker``.
PARKED_AT = "tcp://daskinfer-parked:0"

_PARKED = frozenset({PARKED_AT})


@dataclass(slots=True)
class NewTask:
    """What :meth:`TaskStates.create` needs to know of one request."""

    key: Key
    model: Model
    payload: protocol.Payload
    dependencies: list[Key]
    priority: float
    retries: int


class TaskStates(Facts):
    """Parks, dispatches, completes and fails requests in a scheduler's state.

    Parameters
    ----------
    scheduler
        The scheduler whose tasks these are.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._sequence = 0

    def guard(
        self, is_request: Callable[[Key], bool], wanted: Callable[[], int]
    ) -> None:
        """As :func:`scheduler_plugins.taskstate.guards.guard`, for this scheduler."""
        guards.guard(self.scheduler, is_request, wanted)

    def tune_stream(self, address: str, interval: float) -> None:
        """Shorten the interval in which messages to a worker are collected."""
        guards.tune(self.scheduler.stream_comms.get(address), interval)

    def tune_client_stream(self, client: str, interval: float) -> None:
        """Shorten the interval in which messages to a client are collected."""
        guards.tune(self.scheduler.client_comms.get(client), interval)

    # Catching

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
        ts.worker_restrictions = set(_PARKED)
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
        ts.worker_restrictions = set(_PARKED)

    def _join_span(self, tasks: list[TaskState]) -> None:
        spans = self.scheduler.extensions.get("spans")
        fresh = [ts for ts in tasks if ts.group.span_id is None]
        if spans is not None and fresh:
            spans.observe_tasks(fresh, span_metadata={"collections": []}, code=())

    # Dispatching

    def dispatch(
        self, keys: Sequence[Key], address: str, stimulus_id: str
    ) -> dict[Key, int]:
        """Move parked requests to ``processing`` on a worker.

        Returns
        -------
        dict
            The run id of each, which tells this attempt from any other. A request
            that is not parked any more is left out.
        """
        s = self.scheduler
        ws = s.workers[address]
        stealing = s.extensions.get("stealing")
        target = {address}
        run_ids: dict[Key, int] = {}
        changes = Changes(s)
        for key in keys:
            ts = s.tasks.get(key)
            if ts is None or ts.state != "no-worker":
                continue
            ts.worker_restrictions = target
            recommendations, client_msgs, _ = s._transition(
                key, "processing", stimulus_id
            )
            # It parks again by itself if Dask ever releases it.
            ts.worker_restrictions = set(_PARKED)
            changes.add((recommendations, client_msgs, {}))
            if ts.processing_on is not ws:
                continue
            if stealing is not None:
                stealing.remove_key_from_stealable(ts)
            # Requests take no task slot. Counted as if they did, the user's own
            # tasks would be held back until all inference has ended.
            ws.add_to_long_running(ts)
            assert ts.run_id is not None
            run_ids[key] = ts.run_id
        s.check_idle_saturated(ws)
        changes.apply(stimulus_id)
        return run_ids

    def is_current(self, key: Key, address: str, run_id: int) -> bool:
        """Whether this attempt of a request is the one that counts."""
        ts = self.scheduler.tasks.get(key)
        return (
            ts is not None
            and ts.state == "processing"
            and ts.run_id == run_id
            and ts.processing_on is not None
            and ts.processing_on.address == address
        )

    def complete(
        self,
        message: protocol.DoneMessage,
        run_ids: dict[Key, int],
        address: str,
        clients: dict[Key, str | None],
        metadata: Callable[[Key], dict[str, Any]],
        startstop: dict[str, Any],
    ) -> list[Key]:
        """Take over the results a worker has stored, in one step.

        Parameters
        ----------
        message
            What the worker said.
        run_ids
            The attempts of its batch, from :meth:`dispatch`.
        clients
            Who takes a small result with the word that it exists.
        metadata
            What to keep with each task that is answered now.
        startstop
            Its share of the batch's time, for Dask's task stream.

        Returns
        -------
        list of keys
            Those that were answered now. The worker is told to drop the others.
        """
        s = self.scheduler
        ws = s.workers.get(address)
        if ws is None:
            return []
        stimulus_id = message["stimulus_id"]
        changes = Changes(s)
        completed: list[Key] = []
        stale: list[Key] = []
        answers = Answers(message["pack"])
        types, typenames = message["types"], message["typenames"]
        for place, (key, nbytes, index) in enumerate(
            zip(message["keys"], message["nbytes"], message["type_index"], strict=True)
        ):
            ts = s.tasks.get(key)
            if (
                ts is not None
                and ts.state == "processing"
                and ts.run_id == run_ids.get(key)
                and ts.processing_on is ws
            ):
                ts.metadata = {**(ts.metadata or {}), "daskinfer": metadata(key)}
                changes.add(
                    s._transition(
                        key,
                        "memory",
                        stimulus_id,
                        worker=address,
                        nbytes=nbytes,
                        type=types[index],
                        typename=typenames[index],
                        metadata=ts.metadata,
                        thread=0,
                        status="OK",
                        startstops=[startstop],
                    )
                )
                completed.append(key)
                answers.add(clients.get(key), key, place)
            elif ts is None or ws not in (ts.who_has or ()):
                # Dask does not drop late results by itself.
                stale.append(key)
        if stale:
            changes.tell_worker(
                address,
                {"op": "free-keys", "keys": stale, "stimulus_id": stimulus_id},
            )
        for name, answer in answers.messages():
            changes.tell_client_first(name, answer)
        changes.apply(stimulus_id)
        s.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        return completed

    def metadata_of(self, key: Key) -> dict[str, Any] | None:
        """What :meth:`complete` kept with a task."""
        ts = self.scheduler.tasks.get(key)
        found = (ts.metadata or {}).get("daskinfer") if ts is not None else None
        return None if found is None else dict(found)

    # Failing

    def fail_running(
        self,
        failures: dict[Key, protocol.Failure],
        run_ids: dict[Key, int],
        address: str,
        stimulus_id: str,
    ) -> list[Key]:
        """Fail requests on a worker, or park them again while retries are left.

        Returns
        -------
        list of keys
            Those that have failed for good.
        """
        s = self.scheduler
        changes = Changes(s)
        failed: list[Key] = []
        for key, failure in failures.items():
            ts = s.tasks.get(key)
            if ts is None or key not in run_ids:
                continue
            if ts.state == "no-worker" and not ts.processing_on:
                # The worker's own message that it could not keep the result came
                # first, without a run id, and parked the request.
                changes.add(
                    s._transition(key, "erred", stimulus_id, cause=key, **failure)
                )
                failed.append(key)
                continue
            current = ts.state == "processing" and ts.run_id == run_ids[key]
            changes.add(
                s.stimulus_task_erred(
                    key=key,
                    worker=address,
                    stimulus_id=stimulus_id,
                    run_id=run_ids[key],
                    **failure,
                )
            )
            if current and ts.state == "erred":
                failed.append(key)
        changes.apply(stimulus_id)
        s.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        return failed

    def fail_parked(
        self, keys: Iterable[Key], error: Exception, stimulus_id: str
    ) -> list[Key]:
        """Fail requests that wait, with an exception made here."""
        s = self.scheduler
        failure = dump_failure(error)
        changes = Changes(s)
        failed: list[Key] = []
        for key in keys:
            ts = s.tasks.get(key)
            if ts is None or ts.state != "no-worker":
                continue
            changes.add(s._transition(key, "erred", stimulus_id, cause=key, **failure))
            failed.append(key)
        changes.apply(stimulus_id)
        return failed

    def refuse(self, keys: Iterable[Key], client: str, error: Exception) -> None:
        """Tell a client that no tasks were made of its requests."""
        failure = dump_failure(error)
        for key in keys:
            message = {
                "op": "task-erred",
                "key": key,
                "exception": failure["exception"],
                "traceback": failure["traceback"],
            }
            self.scheduler.report(message, client=client)

    def release_running(self, keys: Iterable[Key], stimulus_id: str) -> None:
        """Park requests again that are processing somewhere."""
        tasks = self.scheduler.tasks
        self.scheduler.transitions(
            {
                key: "released"
                for key in keys
                if key in tasks and tasks[key].state == "processing"
            },
            stimulus_id,
        )


def _asked_workers(ts: TaskState) -> frozenset[str] | None:
    if not ts.worker_restrictions or ts.worker_restrictions == _PARKED:
        return None
    return frozenset(ts.worker_restrictions)
