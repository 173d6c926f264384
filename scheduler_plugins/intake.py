"""How requests come in: caught in a graph, or by the fast path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import monotonic

from daskinfer import payload, protocol
from daskinfer.cache.gate import FIRST_REST
from daskinfer.exceptions import UnknownDeployment
from daskinfer.failure import origin
from daskinfer.handle import Model
from daskinfer.logs import Log
from daskinfer.options import annotated_timeout
from daskinfer.wording import counted
from scheduler_plugins.constraint import ANYWHERE, Constraint
from scheduler_plugins.request import Request
from scheduler_plugins.taskstate import NewTask

if TYPE_CHECKING:
    from scheduler_plugins.lifecycle import Lifecycle
    from scheduler_plugins.registry import Registry
    from scheduler_plugins.routing import Routing
    from scheduler_plugins.taskstate import TaskStates

logger = Log("intake")


class Intake:
    """Makes a :class:`Request` of what comes, and parks its task.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    registry
        What is deployed.
    routing
        Tells which version answers a request.
    lifecycle
        Follows every request from then on.
    clients
        Takes in the clients that have sent requests.
    rest
        Tells for how many seconds a deployment's caches are not worth asking.
    interval
        Seconds in which messages to a client are collected.
    """

    def __init__(
        self,
        tasks: TaskStates,
        registry: Registry,
        routing: Routing,
        lifecycle: Lifecycle,
        clients: set[str],
        rest: Callable[[str, float], float],
        interval: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._clients = clients
        self._rest = rest
        self._tasks = tasks
        self._registry = registry
        self._routing = routing
        self._interval = interval

    def __repr__(self) -> str:
        return f"<Intake to {self._lifecycle!r}>"

    def take_graph(self, client: str, tasks: list[Key]) -> None:
        """Catch the requests in a graph before Dask places them."""
        now = monotonic()
        steps = self._tasks.steps(tasks)
        first = next(iter(steps), None)
        for key in tasks:
            model = self._tasks.model_of(key)
            if model is None or self._lifecycle.knows(key):
                continue
            request = Request(
                key, model.name, model.version, now, self._tasks.priority(key)
            )
            self._clients.add(client)
            request.has_dependencies = self._tasks.has_dependencies(key)
            request.constraint = ANYWHERE
            if first is not None and key in steps:
                self._routing.bind(request, first)
            try:
                request.constraint = self._tasks.park(key)
                request.timeout = self._timeout_of(request)
                self._measure(request)
            except Exception as error:
                request.error = error
            self._lifecycle.arrived(request)

    def take(self, client: str, keys: list[Key], message: dict[str, Any]) -> None:
        """Take in requests of the fast path, or tell the client why not."""
        try:
            self._take_in(client=client, keys=keys, **message)
        except Exception as error:
            told = counted(len(keys), "request"), client, origin(error)
            about: dict[str, Any] = {
                "deployment": message.get("name"),
                "stimulus_id": protocol.SUBMIT,
            }
            logger.warning("Refused %s of %s: %s", *told, **about)
            logger.debug("Refused %s of %s: %s", *told, exc_info=True, **about)
            self._tasks.refuse(keys, client, error)
            self._lifecycle.refused(message.get("name"), keys)

    def _take_in(
        self,
        name: str,
        version: str | None,
        keys: list[Key],
        payloads: list[protocol.Payload],
        signatures: list[str | None],
        rows: list[int],
        dependencies: dict[int, list[Key]],
        priority: float,
        retries: int,
        workers: list[str | int] | None,
        allow_other_workers: bool,
        resources: dict[str, float] | None,
        inline: int,
        timeout: float | None,
        contents: dict[int, bytes],
        stream: protocol.StreamOrder | None,
        client: str,
    ) -> None:
        now = monotonic()
        if timeout is None:
            timeout = self._request_timeout(name)
        stimulus_id = f"daskinfer-submit-{now}"
        self._clients.add(client)
        self._tasks.tune_client_stream(client, self._interval)
        model = Model(name, version)
        new = [
            NewTask(key, model, body, dependencies.get(i, []), priority, retries)
            for i, (key, body) in enumerate(zip(keys, payloads, strict=True))
        ]
        constraint = self._constraint(workers, allow_other_workers, resources)
        created, wanted = self._tasks.create(client, new, stimulus_id)
        position = {key: i for i, key in enumerate(keys)}
        for key in created:
            i = position[key]
            request = Request(
                key,
                name,
                version,
                now,
                priority,
                rows[i],
                signatures[i],
                client,
                inline,
            )
            request.has_dependencies = i in dependencies
            request.constraint = constraint
            request.timeout = timeout
            request.content = contents.get(i)
            request.stream = None if stream is None else stream.copy()
            self._lifecycle.arrived(request)
        self._tasks.start(wanted, stimulus_id)
        seconds = self._rest(name, monotonic()) if contents else 0.0
        if seconds:
            about: protocol.RestMessage = {
                "op": protocol.REST,
                "name": name,
                # Another deployment may have the name by then.
                "seconds": min(seconds, FIRST_REST),
            }
            self._tasks.tell(client, dict(about))

    def _constraint(
        self,
        workers: list[str | int] | None,
        preferred_only: bool,
        resources: dict[str, float] | None,
    ) -> Constraint:
        if workers is None and not resources:
            return ANYWHERE
        addresses, hosts = self._tasks.resolve_workers(workers)
        amounts = tuple(sorted((resources or {}).items()))
        return Constraint(addresses, hosts, amounts, preferred_only)

    def _timeout_of(self, request: Request) -> float | None:
        annotated = annotated_timeout(self._tasks.annotation(request.key, "daskinfer"))
        if annotated is not None:
            return annotated
        return self._request_timeout(request.name)

    def _request_timeout(self, name: str) -> float | None:
        try:
            return self._registry.deployment(name).request_timeout
        except UnknownDeployment:
            return None  # the request fails so when it waits

    def _measure(self, request: Request) -> None:
        """Find out what a request of a graph may share a pass with."""
        if request.has_dependencies:
            return
        deployment = self._registry.deployment(request.name)
        args, kwargs = self._tasks.inputs(request.key)
        measured = payload.measure(args, kwargs, deployment.batch_dim)
        request.rows = measured.rows
        request.signature = measured.signature or f"alone-{request.key!r}"
