"""The only module that touches the inner state of Dask's scheduler.

A request is an ordinary Dask task that no worker is ever asked to compute. It is
*parked* in the state ``no-worker`` by a restriction to an address that does not
exist; when its batch is sent it is moved to ``processing`` on the chosen worker by
Dask's own transition, whose compute-task message is thrown away; when the batch is
answered it goes to ``memory``, again by Dask's own transition. So whatever Dask
does with tasks (progress bars, task streams, cancellation, recomputing what a dead
worker held, ``KilledWorker``) works for requests too.

Everything here runs on the scheduler's event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.core import Status

from daskinfer.exceptions import NotServable
from daskinfer.failure import dump_failure
from daskinfer.handle import Model

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

    from daskinfer import protocol

#: No worker has this address, so a task restricted to it waits in ``no-worker``.
PARKED_AT = "tcp://daskinfer-parked:0"

_PARKED = frozenset({PARKED_AT})


@dataclass(frozen=True, slots=True)
class Constraint:
    """Where the user allows a request to run.

    Parameters
    ----------
    workers
        Worker addresses, or None for any.
    hosts
        Host names; a worker in ``workers`` or on one of them will do.
    resources
        ``(name, amount)`` pairs a worker must have declared.
    preferred_only
        Whether ``workers`` and ``hosts`` are only a preference.

    Examples
    --------
    >>> Constraint().anywhere
    True
    """

    workers: frozenset[str] | None = None
    hosts: frozenset[str] | None = None
    resources: tuple[tuple[str, float], ...] = ()
    preferred_only: bool = False

    @property
    def anywhere(self) -> bool:
        """Whether every worker will do."""
        return self.workers is None and self.hosts is None and not self.resources

    def __str__(self) -> str:
        parts = []
        if self.workers is not None or self.hosts is not None:
            places = sorted((self.workers or set()) | (self.hosts or set()))
            parts.append("workers " + ", ".join(places))
        if self.resources:
            parts.append(
                "resources " + ", ".join(f"{name}={n:g}" for name, n in self.resources)
            )
        return " and ".join(parts) or "any worker"


ANYWHERE = Constraint()


class FastTask:
    """The ``run_spec`` of a request that came by the fast path.

    Dask never runs it; it marks the task as a request and keeps the inputs, still
    pickled, for as long as the task lives, as a graph would.
    """

    __slots__ = ("dependencies", "func", "key", "payload")

    data_producer = False

    def __init__(
        self,
        key: Key,
        func: Model,
        payload: protocol.Payload,
        dependencies: frozenset[Key],
    ) -> None:
        self.key = key
        self.func = func
        self.payload = payload
        self.dependencies = dependencies

    def __repr__(self) -> str:
        return f"<FastTask {self.key!r} {self.func!r}>"


@dataclass(slots=True)
class NewTask:
    """What :meth:`TaskStates.create` needs to know of one request."""

    key: Key
    model: Model
    payload: protocol.Payload
    dependencies: list[Key]
    priority: float
    retries: int


class TaskStates:
    """Parks, dispatches, completes and fails requests in a scheduler's state.

    Parameters
    ----------
    scheduler
        The scheduler whose tasks these are.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._sequence = 0

    def __repr__(self) -> str:
        return f"<TaskStates of {self.scheduler.address}>"

    # What is there

    def model_of(self, key: Key) -> Model | None:
        """The handle a task calls, if it is a request and nothing else."""
        ts = self.scheduler.tasks.get(key)
        func = getattr(ts.run_spec, "func", None) if ts is not None else None
        return func if isinstance(func, Model) else None

    def inputs(self, key: Key) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The ``(args, kwargs)`` of a request that came with a graph."""
        spec: Any = self.scheduler.tasks[key].run_spec
        return spec.args, spec.kwargs

    def payload(
        self, key: Key, pickle: Callable[[Any], protocol.Payload]
    ) -> protocol.Payload:
        """A request's pickled inputs, as they came or pickled now."""
        spec: Any = self.scheduler.tasks[key].run_spec
        return spec.payload if isinstance(spec, FastTask) else pickle(self.inputs(key))

    def has_dependencies(self, key: Key) -> bool:
        """Whether some of a request's inputs are results of other tasks."""
        return bool(self.scheduler.tasks[key].dependencies)

    def priority(self, key: Key) -> float:
        """What the user gave as ``priority=``."""
        priority = self.scheduler.tasks[key].priority
        return -float(priority[0]) if priority else 0.0

    def suspicious(self, key: Key) -> int:
        """How many workers have died while they had this request."""
        return self.scheduler.tasks[key].suspicious

    @property
    def bandwidth(self) -> float:
        """Bytes per second between workers, as Dask measures it."""
        return float(self.scheduler.bandwidth)

    def who_has(self, keys: Iterable[Key]) -> dict[Key, list[str]]:
        """Addresses of the workers that hold the inputs of these requests."""
        tasks = self.scheduler.tasks
        return {
            dts.key: [ws.address for ws in dts.who_has or ()]
            for key in keys
            for dts in tasks[key].dependencies
        }

    def missing_bytes(self, key: Key, address: str) -> int:
        """Bytes of a request's inputs that would have to travel to a worker."""
        ts, ws = self.scheduler.tasks.get(key), self.scheduler.workers.get(address)
        if ts is None or not ts.dependencies:
            return 0
        return sum(
            dts.get_nbytes()
            for dts in ts.dependencies
            if ws is None or ws not in (dts.who_has or ())
        )

    def home(self, key: Key, at_least: float) -> str | None:
        """The worker that holds most of a request's inputs.

        None where less than ``at_least`` bytes would travel to any other.
        """
        held: dict[str, int] = {}
        total = 0
        for dts in self.scheduler.tasks[key].dependencies:
            nbytes = dts.get_nbytes()
            total += nbytes
            for ws in dts.who_has or ():
                held[ws.address] = held.get(ws.address, 0) + nbytes
        if total < at_least or not held:
            return None
        return max(held, key=held.__getitem__)

    def running(self) -> list[str]:
        """Addresses of the workers that may be given work."""
        return [ws.address for ws in self.scheduler.running]

    def declares(self, address: str, resources: Iterable[tuple[str, float]]) -> bool:
        """Whether a worker has declared at least these resources."""
        ws = self.scheduler.workers.get(address)
        return ws is not None and all(
            ws.resources.get(name, 0) >= amount for name, amount in resources
        )

    def declared(self, resource: str) -> dict[str, float]:
        """Which workers have declared a resource, and how much of it."""
        return dict(self.scheduler.resources.get(resource, {}))

    def admits(self, constraint: Constraint, address: str) -> bool:
        """Whether a constraint allows a worker, preferences aside."""
        if not self.declares(address, constraint.resources):
            return False
        if constraint.workers is None and constraint.hosts is None:
            return True
        if constraint.workers is not None and address in constraint.workers:
            return True
        ws = self.scheduler.workers[address]
        return constraint.hosts is not None and ws.host in {
            self.scheduler.coerce_hostname(host) for host in constraint.hosts
        }

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

    def resolve_workers(
        self, workers: Sequence[str] | None
    ) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        """Split what a user names into worker addresses and host names."""
        if workers is None:
            return None, None
        addresses, hosts = set(), set()
        for worker in workers:
            try:
                addresses.add(self.scheduler.coerce_address(worker))
            except ValueError:
                hosts.add(worker)
        return frozenset(addresses) or None, frozenset(hosts) or None

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
        changes = _Changes(s)
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
        changes = _Changes(s)
        completed: list[Key] = []
        stale: list[Key] = []
        types, typenames = message["types"], message["typenames"]
        for key, nbytes, index in zip(
            message["keys"], message["nbytes"], message["type_index"], strict=True
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
            elif ts is None or ws not in (ts.who_has or ()):
                # Dask does not drop late results by itself.
                stale.append(key)
        if stale:
            changes.tell_worker(
                address,
                {"op": "free-keys", "keys": stale, "stimulus_id": stimulus_id},
            )
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
        changes = _Changes(s)
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
        changes = _Changes(s)
        failed: list[Key] = []
        for key in keys:
            ts = s.tasks.get(key)
            if ts is None or ts.state != "no-worker":
                continue
            changes.add(s._transition(key, "erred", stimulus_id, cause=key, **failure))
            failed.append(key)
        changes.apply(stimulus_id)
        return failed

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

    # What Dask would do with parked tasks, and should not

    def guard(
        self, is_request: Callable[[Key], bool], wanted: Callable[[], int]
    ) -> None:
        """Keep Dask's time-outs and autoscaling from misreading parked requests.

        Parameters
        ----------
        is_request
            Whether a key is a request of ours.
        wanted
            How many workers the waiting requests justify.
        """
        s = self.scheduler
        check = s._check_unrunnable_task_timeouts
        target = s.handlers["adaptive_target"]

        @contextlib.contextmanager
        def hidden() -> Iterator[None]:
            requests = {
                ts: since for ts, since in s.unrunnable.items() if is_request(ts.key)
            }
            for ts in requests:
                del s.unrunnable[ts]
            try:
                yield
            finally:
                s.unrunnable.update(
                    (ts, since)
                    for ts, since in requests.items()
                    if ts.state == "no-worker"
                )

        def check_others(*args: Any, **kwargs: Any) -> Any:
            # `no-workers-timeout` would fail requests that wait for their batch.
            with hidden():
                return check(*args, **kwargs)

        def adaptive_target(*args: Any, **kwargs: Any) -> int:
            # Dask takes each parked request for half a second of work.
            with hidden():
                own: int = target(*args, **kwargs)
            return max(own, wanted())

        s._check_unrunnable_task_timeouts = check_others  # type: ignore[method-assign]
        s.handlers["adaptive_target"] = adaptive_target

    def tune_stream(self, address: str, interval: float) -> None:
        """Shorten the interval in which messages to a worker are collected."""
        stream = self.scheduler.stream_comms.get(address)
        if stream is not None:
            _tune(stream, interval)

    def tune_client_stream(self, client: str, interval: float) -> None:
        """Shorten the interval in which messages to a client are collected."""
        stream = self.scheduler.client_comms.get(client)
        if stream is not None:
            _tune(stream, interval)

    def is_running(self, address: str) -> bool:
        """Whether a worker is there and neither paused nor closing."""
        ws = self.scheduler.workers.get(address)
        return ws is not None and ws.status == Status.running


class _Changes:
    """What several transitions ask for, applied together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._recommendations: dict[Key, Any] = {}
        self._client_msgs: dict[str, list[Any]] = {}
        self._worker_msgs: dict[str, list[Any]] = {}

    def add(self, changes: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
        recommendations, client_msgs, worker_msgs = changes
        self._recommendations.update(recommendations)
        for client, messages in client_msgs.items():
            self._client_msgs.setdefault(client, []).extend(messages)
        for worker, messages in worker_msgs.items():
            self._worker_msgs.setdefault(worker, []).extend(messages)

    def tell_worker(self, address: str, message: dict[str, Any]) -> None:
        self._worker_msgs.setdefault(address, []).append(message)

    def apply(self, stimulus_id: str) -> None:
        s = self._scheduler
        s._transitions(
            self._recommendations, self._client_msgs, self._worker_msgs, stimulus_id
        )
        s.send_all(self._client_msgs, self._worker_msgs)


def _asked_workers(ts: TaskState) -> frozenset[str] | None:
    if not ts.worker_restrictions or ts.worker_restrictions == _PARKED:
        return None
    return frozenset(ts.worker_restrictions)


def _tune(stream: Any, interval: float) -> None:
    stream.interval = interval
    # Dask keeps the last thousand messages for debugging, here with all the inputs
    # and outputs they carry.
    stream.recent_message_log.clear()
    stream.recent_message_log = type(stream.recent_message_log)(maxlen=0)
