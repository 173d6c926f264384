"""The worker plugin: takes batches, runs them on the device, reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode, TaskRef
from dask.typing import Key
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.metrics import monotonic
from distributed.protocol.serialize import to_serialize
from distributed.utils_comm import gather_from_workers
from distributed.worker import _worker_cvar

from daskinfer import config, protocol, transport
from daskinfer.exceptions import InferenceError
from daskinfer.failure import dump_failure
from daskinfer.worker.execution import Call, Item, Outcome
from daskinfer.worker.resources import ResourceAccount
from daskinfer.worker.results import store

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.device import Device, DeviceReport
    from daskinfer.worker.models import ResidentModel

logger = logging.getLogger("distributed.inference.runtime")

#: The resource that stands for a kind of device.
_RESOURCE_OF = {"npu": "NPU", "cuda": "GPU"}


def guarded(handler: Callable[..., None]) -> Callable[..., None]:
    """Keep an error in a stream handler from closing the worker."""

    @wraps(handler)
    def handle(self: Any, **message: Any) -> None:
        try:
            handler(self, **message)
        except Exception:
            logger.exception("%s failed; the message is lost", handler.__name__)

    return handle


@dataclass(slots=True)
class Job:
    """A batch that has arrived."""

    batch: str
    model: ResidentModel
    payloads: dict[Key, protocol.Payload]
    who_has: dict[Key, list[str]]
    pass_sizes: list[int]
    pass_rows: int
    arrived: float
    started: float = 0.0
    ended: float = 0.0
    dropped: set[Key] = field(default_factory=set)


class InferenceRuntime(WorkerPlugin):
    """Runs the batches that the scheduler plugin sends to a worker.

    Installed by the scheduler plugin. Batches run on a thread of their own, one
    after the other, in the order in which they came: they take no task slot and
    wait for none.

    Notes
    -----
    Handlers run on the worker's event loop, models on the device's thread.
    """

    name = "daskinfer-runtime"
    idempotent = True

    worker: Worker

    def __repr__(self) -> str:
        if not hasattr(self, "worker"):
            return "<InferenceRuntime: not set up>"
        return (
            f"<InferenceRuntime on {self.worker.address} models: {len(self.models)} "
            f"batches: {len(self.jobs)}>"
        )

    # Life

    def setup(self, worker: Worker) -> None:
        """Install handlers; look for devices in the background, then say hello."""
        self.worker = worker
        self.models: dict[tuple[str, str], ResidentModel] = {}
        self.jobs: dict[str, Job] = {}
        self.account = ResourceAccount(worker)
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._report: DeviceReport | None = None
        self._turn = asyncio.Lock()
        self._packed_limit = config.nbytes("gather.small-limit")
        self._device_thread = ThreadPoolExecutor(
            1, "daskinfer-device", initializer=_worker_cvar.set, initargs=(worker,)
        )
        self._loader_thread = ThreadPoolExecutor(
            config.integer("loading-threads"), "daskinfer-loader"
        )
        worker.stream_handlers.update(
            {
                protocol.RUN: self.run,
                protocol.DROP: self.drop,
                protocol.LOAD: self.load,
                protocol.UNLOAD: self.unload,
            }
        )
        worker.handlers[protocol.FETCH] = self.fetch
        worker.batched_stream.interval = config.seconds("send-interval")
        transport.register()
        worker._ongoing_background_tasks.call_soon(self._say_hello)

    def teardown(self, worker: Worker) -> None:
        """Let go of models and threads."""
        for loading in self._loading.values():
            loading.cancel()
        self._device_thread.shutdown(wait=False, cancel_futures=True)
        self._loader_thread.shutdown(wait=False, cancel_futures=True)
        self.models.clear()

    def transition(self, key: Key, start: str, finish: str, **kwargs: Any) -> None:
        """Notice tasks that end and give the device back."""
        if start in ("executing", "long-running"):
            self.account.task_ended()

    async def _say_hello(self) -> None:
        report = await self._in_loader(_detect)
        self._report = report
        message: protocol.HelloMessage = {
            "op": protocol.HELLO,
            "devices": {b.kind: b.kind for b in report.backends if b.count},
            "reasons": {b.kind: b.reason for b in report.backends if not b.count},
        }
        self.worker.batched_send(dict(message))

    # Loading

    @guarded
    def load(
        self,
        name: str,
        version: str,
        digest: str,
        device: str,
        resources: dict[str, float] | None,
        policy: dict[str, Any],
        stimulus_id: str,
    ) -> None:
        """Load and warm a version in the background, then report."""
        coroutine = self._load(name, version, device, resources, policy)
        task = asyncio.create_task(coroutine, name=f"load-{name}-{version}")
        self._loading[name, version] = task
        task.add_done_callback(partial(self._loading_ended, (name, version)))

    def _loading_ended(self, which: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._loading.get(which) is task:
            del self._loading[which]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Loading %r %r failed", *which, exc_info=error)

    async def _load(
        self,
        name: str,
        version: str,
        device: str,
        resources: dict[str, float] | None,
        policy: dict[str, Any],
    ) -> None:
        started = monotonic()
        report: dict[str, Any] = {
            "op": protocol.LOADED,
            "name": name,
            "version": version,
            "digest": "",
            "failure": None,
            "device": "",
            "device_class": "",
            "timings": [],
        }
        try:
            parts = await self.worker.scheduler.daskinfer_artifact(
                name=name, version=version
            )
            if parts is None:
                return  # undeployed meanwhile
            model = await self._in_loader(
                self._build, name, version, parts["artifact"], device, resources, policy
            )
            if parts["warmup"] is not None:
                example = transport.loads(_frames(parts["warmup"]))
                report["timings"] = await self._warm(model, example)
            self.models[name, version] = model
            report["digest"] = model.digest
            report["device"] = str(model.device.torch_device)
            report["device_class"] = model.device.device_class
        except Exception as error:
            logger.info("Could not load %r %r", name, version, exc_info=True)
            report["failure"] = dump_failure(error)
        report["seconds"] = monotonic() - started
        self.worker.batched_send(report)

    def _build(
        self,
        name: str,
        version: str,
        message: dict[str, Any],
        spec: str,
        resources: dict[str, float] | None,
        policy: dict[str, Any],
    ) -> ResidentModel:
        from daskinfer.artifact import Artifact
        from daskinfer.device import open_device
        from daskinfer.worker.models import ResidentModel

        device: Device = open_device(spec)
        needed = resources or {_RESOURCE_OF.get(device.kind, ""): 1.0}
        return ResidentModel.load(
            name,
            version,
            Artifact.from_message(message),
            device,
            self.account.declared(needed),
            policy,
        )

    async def _warm(
        self, model: ResidentModel, example: Call
    ) -> list[tuple[int, float]]:
        steps: Iterator[Any] = iter(model.warmup(example))
        timings: list[tuple[int, float]] = []
        ended = object()
        while True:
            async with self._device(model.resources):
                step = await self._on_device(next, steps, ended)
            if step is ended:
                return timings
            if step is not None:
                timings.append(step)

    @guarded
    def unload(self, name: str, version: str, stimulus_id: str) -> None:
        """Forget a version; a batch that is running ends."""
        loading = self._loading.pop((name, version), None)
        if loading is not None:
            loading.cancel()
        model = self.models.pop((name, version), None)
        if model is not None:
            device = model.device
            del model
            # After whatever still runs on it.
            self._device_thread.submit(device.empty_cache)

    # Batches

    @guarded
    def run(
        self,
        batch: str,
        name: str,
        version: str,
        keys: list[Key],
        payloads: list[protocol.Payload],
        who_has: dict[Key, list[str]],
        pass_sizes: list[int],
        pass_rows: int,
        stimulus_id: str,
    ) -> None:
        """Take a batch."""
        model = self.models.get((name, version))
        if model is None:
            missing = InferenceError(
                f"{self.worker.address} has no {name!r} {version!r} any more"
            )
            self._answer_nothing(batch, keys, missing)
            return
        job = Job(
            batch,
            model,
            dict(zip(keys, payloads, strict=True)),
            who_has,
            pass_sizes,
            pass_rows,
            monotonic(),
        )
        self.jobs[batch] = job
        self.worker._ongoing_background_tasks.call_soon(self._run, job)

    @guarded
    def drop(self, batch: str, keys: list[Key], stimulus_id: str) -> None:
        """Some requests of a batch are not wanted any more."""
        job = self.jobs.get(batch)
        if job is not None:
            job.dropped.update(keys)

    async def _run(self, job: Job) -> None:
        try:
            inputs, missing = await self._fetch_inputs(job)
            async with self._device(job.model.resources):
                outcome = await self._on_device(self._execute, job, inputs)
            self._report_done(job, outcome, missing)
        except Exception as error:
            logger.exception("Batch %s could not be run", job.batch)
            self._answer_nothing(job.batch, list(job.payloads), error)
        finally:
            del self.jobs[job.batch]

    async def _fetch_inputs(self, job: Job) -> tuple[dict[Key, Any], set[Key]]:
        """Inputs that are results of tasks, and those that are nowhere."""
        data = self.worker.data
        inputs = {key: data[key] for key in job.who_has if key in data}
        elsewhere = {k: w for k, w in job.who_has.items() if k not in inputs}
        if not elsewhere:
            return inputs, set()
        fetched, missing, failed, _ = await gather_from_workers(
            elsewhere, rpc=self.worker.rpc, who=self.worker.address
        )
        return inputs | fetched, {*missing, *failed}

    def _execute(self, job: Job, inputs: dict[Key, Any]) -> Outcome:
        job.started = monotonic()
        items = [
            Item(key, partial(_load_call, body, inputs))
            for key, body in job.payloads.items()
            if key not in job.dropped
        ]
        outcome = job.model.run(items, job.pass_sizes, job.pass_rows)
        job.ended = monotonic()
        return outcome

    def _report_done(self, job: Job, outcome: Outcome, missing: set[Key]) -> None:
        stimulus_id = f"daskinfer-done-{job.batch}"
        for key in job.dropped:
            outcome.results.pop(key, None)
        stored = store(self.worker, outcome.results, stimulus_id)
        incomplete = [
            key
            for key, error in outcome.errors.items()
            if isinstance(error, MissingInput) and error.key in missing
        ]
        for missed in incomplete:
            del outcome.errors[missed]
        message: dict[str, Any] = {
            "op": protocol.DONE,
            "batch": job.batch,
            **stored,
            "missing": incomplete,
            "passes": outcome.passes,
            "waited": job.started - job.arrived,
            "ran": job.ended - job.started,
            "device": str(job.model.device.torch_device),
            "stimulus_id": stimulus_id,
        }
        message["failed"] = stored["failed"] | _dump_errors(outcome.errors)
        self.worker.batched_send(message)

    def _answer_nothing(self, batch: str, keys: list[Key], error: Exception) -> None:
        self.worker.batched_send(
            {
                "op": protocol.DONE,
                "batch": batch,
                "keys": [],
                "nbytes": [],
                "type_index": [],
                "types": [],
                "typenames": [],
                "failed": _dump_errors(dict.fromkeys(keys, error)),
                "missing": [],
                "passes": [],
                "waited": 0.0,
                "ran": 0.0,
                "device": "",
                "stimulus_id": f"daskinfer-done-{batch}",
            }
        )

    # Fetching

    async def fetch(self, keys: list[Key]) -> dict[str, Any]:
        """Pack small results into few buffers; large ones are left to Dask."""
        found: list[Key] = []
        values: list[Any] = []
        missing: list[Key] = []
        for key in keys:
            ts = self.worker.state.tasks.get(key)
            if ts is None or ts.state != "memory" or ts.nbytes is None:
                missing.append(key)
            elif ts.nbytes > self._packed_limit:
                missing.append(key)
            else:
                found.append(key)
                values.append(self.worker.data[key])
        header, frames = transport.pack(values)
        return {
            "keys": found,
            "missing": missing,
            "header": header,
            "frames": [to_serialize(frame) for frame in frames],
        }

    # Threads

    def _device(self, resources: Any) -> AsyncExitStack:
        """The device's turn: first come, first served; tasks kept off."""
        return _Turn(self._turn, self.account, resources)

    async def _on_device(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._device_thread, function, *args)

    async def _in_loader(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loader_thread, function, *args)


class _Turn(AsyncExitStack):
    """Holds the queue for the device and its resources while in the block.

    Where no resource is declared, the device's thread is the queue: its next batch
    then starts without a detour over the event loop.
    """

    def __init__(self, turn: asyncio.Lock, account: ResourceAccount, needed: Any):
        super().__init__()
        self._parts = (turn, account.hold(needed)) if needed else ()

    async def __aenter__(self) -> _Turn:
        await super().__aenter__()
        for part in self._parts:
            await self.enter_async_context(part)
        return self


class MissingInput(Exception):
    """An input could not be fetched; the request will be tried again."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


def _detect() -> DeviceReport:
    from daskinfer.device import detect, load_torch

    load_torch()
    return detect()


def _frames(body: protocol.Payload) -> list[Any]:
    return [body] if isinstance(body, bytes) else list(body)


def _load_call(body: protocol.Payload, inputs: dict[Key, Any]) -> Call:
    """Unpickle a request's inputs and put the results of other tasks in."""
    args, kwargs = transport.loads(_frames(body))
    if inputs:
        args = tuple(_resolve(value, inputs) for value in args)
        kwargs = {name: _resolve(value, inputs) for name, value in kwargs.items()}
    return args, kwargs


def _resolve(value: Any, inputs: dict[Key, Any]) -> Any:
    try:
        if isinstance(value, GraphNode):
            return value({key: inputs[key] for key in value.dependencies})
        if isinstance(value, TaskRef):
            return inputs[value.key]
    except KeyError as error:
        raise MissingInput(error.args[0]) from None
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return _resolve_inside(value, inputs)
    return value


def _resolve_inside(value: Any, inputs: dict[Key, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(item, inputs) for key, item in value.items()}
    items = [_resolve(item, inputs) for item in value]
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def _dump_errors(errors: dict[Any, Any]) -> dict[Key, protocol.Failure]:
    """Failures by key; requests that failed together share one traceback."""
    dumped: dict[int, protocol.Failure] = {}
    for error in errors.values():
        if id(error) not in dumped:
            dumped[id(error)] = dump_failure(error)
    return {key: dumped[id(error)] for key, error in errors.items()}


__all__ = ["InferenceRuntime", "Job", "MissingInput"]
