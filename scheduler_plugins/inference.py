"""The scheduler plugin: Dask's events in, the engine's decisions out."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from daskinfer import config, protocol
from daskinfer.guarding import guarded
from daskinfer.logs import Log
from daskinfer.wording import counted
from scheduler_plugins import dashboard, http
from scheduler_plugins.configured import Configured
from scheduler_plugins.deployment import WorkerFacts
from scheduler_plugins.describing import Descriptions
from scheduler_plugins.diagnosis import Diagnosis
from scheduler_plugins.dispatcher import Dispatcher
from scheduler_plugins.distribution import Distribution
from scheduler_plugins.exposition import COLLECTOR
from scheduler_plugins.fetching import Fetching
from scheduler_plugins.health import Suspicion
from scheduler_plugins.intake import Intake
from scheduler_plugins.lifecycle import Lifecycle
from scheduler_plugins.line import Line
from scheduler_plugins.loading import Loading
from scheduler_plugins.readiness import Readiness
from scheduler_plugins.registry import Registry
from scheduler_plugins.replacing import Replacing
from scheduler_plugins.request import Request
from scheduler_plugins.routing import Routing
from scheduler_plugins.scaling import Scaling
from scheduler_plugins.service import Service
from scheduler_plugins.stories import Stories
from scheduler_plugins.swapping import Swapping
from scheduler_plugins.taskstate import TaskStates
from scheduler_plugins.unloading import Unloading
from scheduler_plugins.versions import Versions

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState

logger = Log("plugin")


class InferencePlugin(SchedulerPlugin):
    """Batches and places inference requests inside a Dask scheduler.

    Registered by :func:`daskinfer.deploy` where it is absent; or from the start with
    ``dask scheduler --preload scheduler_plugins``.

    Notes
    -----
    Everything runs on the scheduler's event loop. No hook or handler lets an
    exception out.

    Attributes
    ----------
    registry
        What is deployed, and where.
    dispatcher
        What waits, and what is running.
    requests
        Every request whose task exists.
    """

    name = "daskinfer"
    idempotent = True

    scheduler: Scheduler
    tasks: TaskStates
    registry: Registry
    dispatcher: Dispatcher
    requests: dict[Key, Request]

    def __repr__(self) -> str:
        if not hasattr(self, "registry"):
            return "<InferencePlugin: not started>"
        return (
            f"<InferencePlugin deployments: {len(self.registry.deployments)} "
            f"requests: {len(self.requests)}>"
        )

    # Life

    async def start(self, scheduler: Scheduler) -> None:
        """Install handlers, and the runtime on every worker."""
        from daskinfer.worker import InferenceRuntime

        self.scheduler = scheduler
        self.tasks = TaskStates(scheduler)
        self.registry = Registry()
        self._leaving: set[str] = set()
        self._interval = config.seconds("send-interval") or 0.0
        self.dispatcher = Dispatcher(
            self.tasks,
            scheduler.worker_send,
            self._report_starving,
            self._expire,
            self._hung,
            priority_age=config.seconds("priority-age") or 0.0,
            warn_after=config.seconds("no-worker-warning") or 0.0,
            place=lambda request, line: self.lifecycle.place(request),
            suspicion=_configured_suspicion(),
            swap=lambda lines, now: self.swapping.check(lines, now),
            left=lambda: self.versions.batch_ended(),
        )
        self.requests = {}
        self.routing = Routing(self.registry)
        self.unloading = Unloading(scheduler.worker_send)
        self.distribution = Distribution(scheduler.worker_send)
        self.versions = Versions(self)
        self.loading = Loading(self)
        self.swapping = Swapping(self)
        self.replacing = Replacing(
            self.tasks, self.registry, self.dispatcher, scheduler.worker_send
        )
        self.fetching = Fetching(
            self.tasks,
            self.requests.__contains__,
            config.nbytes("gather.small-limit"),
        )
        self.diagnosis = Diagnosis(self.registry, self.tasks)
        self.lifecycle = Lifecycle(
            self.tasks,
            self.registry,
            self.routing,
            self.requests,
            self.dispatcher,
            self.diagnosis,
            scheduler.loop.add_callback,
        )
        self.intake = Intake(
            self.tasks,
            self.registry,
            self.routing,
            self.lifecycle,
            self.fetching.clients,
            self.dispatcher.lines.rest,
            self._interval,
        )
        self.service = Service(self)
        self.descriptions = Descriptions(self)
        self.stories = Stories(self)
        self.configured = Configured(self)
        self.readiness = Readiness(self)
        self.scaling = Scaling(self)
        self.tasks.guard(self.requests.__contains__, self.scaling)
        scheduler.stream_handlers.update(
            {
                protocol.SUBMIT: self.submit,
                protocol.HELLO: self.hello,
                protocol.WARMING: self.loading.warming,
                protocol.LOADED: self.loading.loaded,
                protocol.UNLOADED: self.loading.unloaded,
                protocol.PARKED: self.loading.parked,
                protocol.PROGRESS: self.progress,
                protocol.DONE: self.done,
                protocol.CACHED: self.cached,
                protocol.NOT_FOUND: self.not_found,
                protocol.CHUNKS: self.chunks,
                protocol.READ: self.read,
                protocol.ENDED: self.ended,
                protocol.SLOTS: self.paced,
                **self.distribution.streams(),
            }
        )
        scheduler.handlers.update(
            self.service.handlers()
            | self.descriptions.handlers()
            | self.stories.handlers()
            | self.versions.handlers()
            | self.distribution.calls()
        )
        for address in self.tasks.workers():
            self.tasks.tune_stream(address, self._interval)
        http.add_routes(scheduler)
        COLLECTOR.add(self)
        self.configured.start()
        # Dask adds a plugin when it has started: while this one waits for workers,
        # another client would start a second, which took over its handlers.
        scheduler.add_plugin(self, name=self.name, idempotent=True)
        self.dashboard = dashboard.install(self)
        await scheduler.register_worker_plugin(
            comm=None,
            plugin=dumps(InferenceRuntime()),
            name=InferenceRuntime.name,
            idempotent=True,
        )

    async def close(self) -> None:
        """Let go of files, and of who looks."""
        COLLECTOR.discard(self)
        self.distribution.close()
        if self.dashboard is not None:
            self.dashboard.close()

    # Requests come

    def update_graph(
        self, scheduler: Scheduler, *, client: str, tasks: list[Key], **kwargs: Any
    ) -> None:
        """Catch the requests in a graph before Dask places them."""
        self.intake.take_graph(client, tasks)

    @guarded
    def submit(self, client: str, keys: list[Key], **message: Any) -> None:
        """Take in requests of the fast path, or tell the client why not."""
        self.intake.take(client, keys, message)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget a client that has left; Dask releases its requests."""
        self.fetching.clients.discard(client)
        self.distribution.client_left(client)

    # Requests change state

    def transition(
        self,
        key: Key,
        start: str,
        finish: str,
        *args: Any,
        stimulus_id: str,
        **kwargs: Any,
    ) -> None:
        """Follow what Dask does with the requests."""
        request = self.requests.get(key)
        if request is not None:
            self.lifecycle.moved(request, start, finish)

    # Workers

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Speed up the new worker's stream; its runtime will say hello."""
        self.tasks.tune_stream(worker, self._interval)

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Take a worker out; Dask has parked its requests again by now."""
        expected = worker in self._leaving
        self._tell_left(worker, expected, stimulus_id)
        self.registry.leave(worker)
        self.dispatcher.worker_lost(worker, expected=expected)
        self._leaving.discard(worker)
        self.unloading.left(worker)
        self.distribution.worker_left(worker)
        self.swapping.assigned(*self.registry.versions())
        self.versions.worker_left()
        self.service.changed()

    def _tell_left(self, worker: str, expected: bool, stimulus_id: str) -> None:
        had = [v for v in self.registry.versions() if worker in v.replicas]
        if not had or self.tasks.is_closing:
            return
        names = {v.name for v in had}
        logger.log(
            logging.INFO if expected else logging.WARNING,
            "%s has left, which had %s" if expected else "Lost %s, which had %s",
            worker,
            ", ".join(f"{v.name!r} {v.version!r}" for v in had),
            deployment=names.pop() if len(names) == 1 else None,
            stimulus_id=stimulus_id,
            limited=False,
        )

    @guarded
    def hello(
        self,
        devices: dict[str, str],
        reasons: dict[str, str],
        room: dict[str, int],
        worker: str,
    ) -> None:
        """A worker's runtime is set up: load what is deployed."""
        if self.tasks.has_worker(worker):
            seat = self.tasks.seat(worker)
            resources = self.tasks.resources(worker)
            facts = WorkerFacts(worker, devices, reasons, resources, seat, room)
            doubt = self.replacing.came(seat)
            for version, replica in self.registry.join(facts, doubt):
                self.loading.load(version, replica)
            self.swapping.assigned(*self.registry.versions())
            self.dispatcher.workers_changed()
            self.versions.settle()
        self.service.changed()

    @guarded
    def progress(self, worker: str, batch: str, waits_for: str) -> None:
        """A batch waits for more than its turn, or has begun after that."""
        self.dispatcher.progressed(batch, worker, waits_for)

    @guarded
    def done(self, worker: str, **message: Any) -> None:
        """A worker has answered a batch, or says that its device is broken."""
        self.dispatcher.done(message, worker)  # type: ignore[arg-type]
        if message["broken"]:
            self.replacing.device_failed(worker, message["broken"])
            self.versions.settle()
            self.service.changed()
        self.versions.batch_ended()

    @guarded
    def cached(self, worker: str, name: str, added: bytes, dropped: bytes) -> None:
        """A worker tells of its cache."""
        if worker in self.registry.workers and name in self.registry.deployments:
            self.dispatcher.cached(name, worker, added, dropped)

    @guarded
    def not_found(self, worker: str, batch: str, dropped: bytes) -> None:
        """What a worker should have in its cache is not there."""
        self.dispatcher.not_found(batch, worker, dropped)

    @guarded
    def chunks(self, worker: str, **message: Any) -> None:
        """A worker sends chunks of streams."""
        self.dispatcher.streams.chunks(message, worker)  # type: ignore[arg-type]

    @guarded
    def read(self, client: str, keys: list[Key], taken: list[int]) -> None:
        """A client has read chunks of streams."""
        self.dispatcher.streams.read(self.requests, client, keys, taken)

    @guarded
    def ended(self, worker: str, **message: Any) -> None:
        """Streams have ended on a worker, or its device is broken."""
        if message["broken"]:
            self.replacing.device_failed(worker, message["broken"])
            self.service.changed()
        else:
            self.dispatcher.stream_ended(message, worker)  # type: ignore[arg-type]
        self.versions.batch_ended()

    @guarded
    def paced(self, worker: str, **message: Any) -> None:
        """A worker says how a model advances there that is answered step by step."""
        self.dispatcher.paced(message, worker)  # type: ignore[arg-type]

    def log_event(self, topic: str, msg: Any) -> None:
        """Notice that a worker was paused, runs again, or leaves on purpose."""
        action = msg.get("action") if isinstance(msg, dict) else None
        if action == "worker-status-change":
            if msg["status"] in ("closing", "closing_gracefully"):
                self._leaving.add(topic)
            else:
                self._leaving.discard(topic)
            self.dispatcher.wake()
        elif action == "remove-worker" and msg.get("expected") and topic != "all":
            self._leaving.add(topic)

    def restart(self, scheduler: Scheduler) -> None:
        """Forget all requests; what is deployed stays, and is loaded again."""
        self.dispatcher.clear()
        self.lifecycle.clear()
        self.versions.batch_ended()

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Keep workers from being retired as idle that are needed."""
        closable = self.scaling.closable([ws.address for ws in workers])
        return [ws for ws in workers if ws.address in closable]

    def _expire(self, keys: list[Key]) -> None:
        self.lifecycle.expire(keys)

    def _hung(self, address: str, reason: str) -> None:
        self.replacing.hung(address, reason)
        self.service.changed()

    def _report_starving(self, line: Line) -> None:
        count = len(line.queue)
        message = (
            f"{counted(count, 'request')} for {line.name!r} "
            f"{'is' if count == 1 else 'are'} waiting: "
            f"{self.diagnosis.problem(line)}"
        )
        self.warn(message, line.name, line.version, "daskinfer-starving")

    def warn(self, message: str, name: str, version: str, stimulus_id: str) -> None:
        """Tell the log, and every client, something about a version."""
        logger.warning(
            message, deployment=name, version=version, stimulus_id=stimulus_id
        )
        self.scheduler.log_event("warn", {"message": dumps(message)})


def _configured_suspicion() -> Suspicion:
    hung_after = config.seconds("health.replace-after")
    return Suspicion(
        config.number("health.suspect-factor", minimum=1),
        config.seconds("health.suspect-after") or 0.0,
        math.inf if hung_after is None else hung_after,
    )
