"""What is read of the scheduler's state."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from dask.typing import Key
from distributed.core import Status

from daskinfer.handle import Model

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from daskinfer import protocol
    from scheduler_plugins.constraint import Constraint

_T = TypeVar("_T")


class Observed(NamedTuple):
    """What a worker has told of itself, as Dask knows it.

    ``metrics`` are those of its last heartbeat, ``lasting`` what it told when it came.
    It may use ``memory_limit`` bytes; 0: any number.
    """

    name: str
    status: str
    resources: dict[str, float]
    metrics: Mapping[str, Any]
    lasting: Mapping[str, Any]
    memory_limit: int

    def telemetry(self, kind: str) -> dict[str, Any]:
        """What it tells of its accelerator; Dask tells a part once only, of GPUs."""
        told = self.metrics.get(kind)
        return {**self.lasting.get(kind, {}), **told} if isinstance(told, dict) else {}


#: How many tasks are looked at for what a request's inputs come of.
_UPSTREAM = 1000


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


class Facts:
    """Answers questions about tasks and workers; changes nothing.

    Parameters
    ----------
    scheduler
        The scheduler that is asked.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.scheduler.address}>"

    # Tasks

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

    def steps(self, keys: Collection[Key]) -> dict[Key, None]:
        """Those requests of a graph that have others of its tasks before or behind."""
        own = set(keys)
        return {
            key: None
            for key in keys
            if self.model_of(key) is not None
            and any(
                other.key in own
                for ts in [self.scheduler.tasks[key]]
                for other in itertools.chain(ts.dependencies, ts.dependents)
            )
        }

    def upstream(self, key: Key, known: Mapping[Key, _T]) -> list[_T]:
        """What is known of the nearest tasks that the inputs of a task come of.

        No more than :data:`_UPSTREAM` tasks are looked at.
        """
        found: list[_T] = []
        seen = {key}
        ahead = deque([self.scheduler.tasks[key]])
        while ahead and len(seen) <= _UPSTREAM:
            for ts in ahead.popleft().dependencies:
                if ts.key in seen:
                    continue
                seen.add(ts.key)
                if ts.key in known:
                    found.append(known[ts.key])
                else:
                    ahead.append(ts)
        return found

    def priority(self, key: Key) -> float:
        """What the user gave as ``priority=``."""
        priority = self.scheduler.tasks[key].priority
        return -float(priority[0]) if priority else 0.0

    def annotation(self, key: Key, name: str) -> Any:
        """What :func:`dask.annotate` has set around a task; None if nothing."""
        return (self.scheduler.tasks[key].annotations or {}).get(name)

    def story(self, key: Key) -> list[tuple[str, str, str, float]]:
        """What Dask remembers of a task's states, the oldest first.

        Its state before and after, the stimulus id, and the time since the epoch.
        """
        return [
            (told.start, told.finish, told.stimulus_id, told.timestamp)
            for told in self.scheduler.story(key)
            if told.key == key
        ]

    def is_parked(self, key: Key) -> bool:
        """Whether a request waits for nothing but a worker."""
        ts = self.scheduler.tasks.get(key)
        return ts is not None and ts.state == "no-worker"

    # Results

    def holder(self, key: Key) -> str | None:
        """A worker that holds a task's result; None if no one does."""
        ts = self.scheduler.tasks.get(key)
        return next(iter(ts.who_has)).address if ts and ts.who_has else None

    def result_nbytes(self, key: Key) -> int:
        """The size of a task's result; -1 if there is none, or nobody knows it."""
        ts = self.scheduler.tasks.get(key)
        return ts.nbytes if ts is not None and ts.state == "memory" else -1

    def wanted_by(self, key: Key) -> list[str]:
        """The clients that want a task."""
        ts = self.scheduler.tasks.get(key)
        return [cs.client_key for cs in (ts and ts.who_wants) or ()]

    # Inputs

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

    # Workers

    def call(self, address: str) -> Any:
        """A worker's own calls, as methods to await."""
        return self.scheduler.rpc(address)

    def has_nanny(self, address: str) -> bool:
        """Whether a worker's process would be started again."""
        ws = self.scheduler.workers.get(address)
        return ws is not None and bool(ws.nanny)

    def seat(self, address: str) -> str:
        """What a worker has in common with one that is started in its place."""
        ws = self.scheduler.workers[address]
        return ws.nanny or str(ws.name)

    def running(self) -> list[str]:
        """Addresses of the workers that may be given work."""
        return [ws.address for ws in self.scheduler.running]

    def rpc(self, address: str) -> Any:
        """What a worker can be asked by."""
        return self.scheduler.rpc(address)

    def resources(self, address: str) -> dict[str, float]:
        """What a worker has declared."""
        return dict(self.scheduler.workers[address].resources)

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

    def workers(self) -> set[str]:
        """Addresses of all workers of the cluster."""
        return set(self.scheduler.workers)

    def runs_tasks(self, address: str) -> bool:
        """Whether a worker has something to compute for users, requests aside."""
        ws = self.scheduler.workers.get(address)
        return ws is not None and len(ws.processing) > len(ws.long_running)

    def held_bytes(self, address: str) -> int:
        """Bytes of the results that a worker holds."""
        ws = self.scheduler.workers.get(address)
        return ws.nbytes if ws is not None else 0

    def observed(self, address: str) -> Observed | None:
        """What a worker has told of itself; None if it is gone."""
        ws = self.scheduler.workers.get(address)
        if ws is None:
            return None
        resources = dict(ws.resources)
        return Observed(
            *(str(ws.name), ws.status.name, resources),
            *(ws.metrics, ws.extra, ws.memory_limit),
        )

    def in_background(
        self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> None:
        """Begin something that ends with the scheduler at the latest."""
        self.scheduler._ongoing_background_tasks.call_soon(function, *args)

    @property
    def is_closing(self) -> bool:
        """Whether the scheduler is on its way out."""
        return self.scheduler.status != Status.running

    def has_worker(self, address: str) -> bool:
        """Whether a worker is part of the cluster."""
        return address in self.scheduler.workers

    def is_running(self, address: str) -> bool:
        """Whether a worker is there and neither paused nor closing."""
        ws = self.scheduler.workers.get(address)
        return ws is not None and ws.status == Status.running

    def resolve_workers(
        self, workers: Sequence[str | int] | None
    ) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        """Split what a user names into worker addresses and host names."""
        if workers is None:
            return None, None
        addresses, hosts = set(), set()
        for worker in workers:
            try:
                # Dask knows workers by names of any kind.
                addresses.add(self.scheduler.coerce_address(cast(str, worker)))
            except ValueError:
                hosts.add(str(worker))
        return frozenset(addresses) or None, frozenset(hosts) or None
