"""The worker plugin: takes batches, runs them on the device, reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.metrics import monotonic

from daskinfer import config, protocol
from daskinfer.exceptions import InferenceError
from daskinfer.failure import describe
from daskinfer.streams import tune
from daskinfer.worker import unloading
from daskinfer.worker.device_queue import DeviceQueue
from daskinfer.worker.execution import Item, Outcome
from daskinfer.worker.inputs import MissingInput, fetch_inputs, load_call
from daskinfer.worker.loading import Loader
from daskinfer.worker.restarting import start_anew
from daskinfer.worker.results import dump_errors, forget, packed, store

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.worker.models import ResidentModel

logger = logging.getLogger("distributed.inference.runtime")


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
    inline: int
    arrived: float
    active: Mapping[str, str]
    done: asyncio.Future[None]
    started: float = 0.0
    fetching: bool = False
    waits_for: str = ""
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

    Attributes
    ----------
    loader
        What is loaded.
    device
        The queue before the device.
    jobs
        Batches that are not answered yet.
    is_closing
        Whether the worker is on its way out.
    """

    name = "daskinfer-runtime"
    idempotent = True

    worker: Worker
    loader: Loader
    device: DeviceQueue
    jobs: dict[str, Job]
    is_closing: bool

    def __repr__(self) -> str:
        if not hasattr(self, "worker"):
            return "<InferenceRuntime: not set up>"
        return (
            f"<InferenceRuntime on {self.worker.address} "
            f"models: {len(self.loader.models)} batches: {len(self.jobs)}>"
        )

    # Life

    def setup(self, worker: Worker) -> None:
        """Install handlers; look for devices in the background, then say hello."""
        self.worker = worker
        self.jobs = {}
        self.is_closing = False
        self.device = DeviceQueue(worker, self._device_is_held)
        self.loader = Loader(worker, self.device)
        self._packed_limit = config.nbytes("gather.small-limit")
        worker.stream_handlers.update(
            {
                protocol.RUN: self.run,
                protocol.DROP: self.drop,
                protocol.LOAD: self.load,
                protocol.UNLOAD: self.unload,
                protocol.ACTIVATE: self.activate,
                protocol.REPLACE: self.replace,
            }
        )
        worker.handlers[protocol.FETCH] = self.fetch
        tune(worker.batched_stream, config.seconds("send-interval") or 0.0)
        worker._ongoing_background_tasks.call_soon(self._say_hello)

    def teardown(self, worker: Worker) -> None:
        """Let go of models and threads; what is not answered is run elsewhere."""
        self.is_closing = True
        self.loader.close()
        self.device.close()

    def transition(self, key: Key, start: str, finish: str, **kwargs: Any) -> None:
        """Notice tasks that end and give the device back."""
        if start in ("executing", "long-running"):
            self.device.account.task_ended()

    async def _say_hello(self) -> None:
        report = await self.loader.detect()
        message: protocol.HelloMessage = {
            "op": protocol.HELLO,
            "devices": {b.kind: b.kind for b in report.backends if b.count},
            "reasons": {b.kind: b.reason for b in report.backends if not b.count},
        }
        self.worker.batched_send(dict(message))

    # Models

    @guarded
    def load(self, **message: Any) -> None:
        """Load and warm a version in the background, then report."""
        self.loader.load(message)

    @guarded
    def unload(self, name: str, version: str, unload: int, stimulus_id: str) -> None:
        """Forget a version, and say so once its memory is free."""
        model, loads = self.loader.forget(name, version)
        jobs = [job.done for job in self.jobs.values() if job.model is model]
        about = {"name": name, "version": version, "unload": unload}
        self.worker._ongoing_background_tasks.call_soon(
            unloading.unload, self.worker, model, [*loads, *jobs], about
        )

    @guarded
    def activate(self, name: str, version: str, stimulus_id: str) -> None:
        """Another version of a deployment answers from now on."""
        self.loader.activate(name, version)

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
        inline: int,
        stimulus_id: str,
    ) -> None:
        """Take a batch."""
        if self.is_closing:
            # The scheduler will know before it could have heard of this batch.
            return
        if self.device.broken is not None:
            self._report(batch, Outcome(broken=self.device.broken))
            return
        model = self.loader.find(name, version)
        if model is None:
            missing = InferenceError(
                f"{self.worker.address} has no {name!r} {version!r} any more"
            )
            self._report(batch, Outcome(errors=dict.fromkeys(keys, missing)))
            return
        job = Job(
            batch,
            model,
            dict(zip(keys, payloads, strict=True)),
            who_has,
            pass_sizes,
            pass_rows,
            inline,
            monotonic(),
            self.loader.active,
            asyncio.get_running_loop().create_future(),
        )
        self.jobs[batch] = job
        # Of attempts of the past: the scheduler knows of no result by now.
        forget(self.worker, keys, stimulus_id)
        if any(key not in self.worker.data for key in who_has):
            self._must_wait(job, protocol.INPUTS)
        elif model.resources and self.device.account.is_waited_for:
            self._must_wait(job, protocol.DEVICE)
        self.worker._ongoing_background_tasks.call_soon(self._run, job)

    @guarded
    def drop(self, batch: str, keys: list[Key], stimulus_id: str) -> None:
        """Some requests of a batch are not wanted any more."""
        job = self.jobs.get(batch)
        if job is not None:
            job.dropped.update(keys)

    async def _run(self, job: Job) -> None:
        try:
            inputs, missing = await fetch_inputs(self.worker, job.who_has)
            job.fetching = False
            outcome = await self.device.run(
                job.model.resources, self._execute, job, inputs
            )
            for key in job.dropped:
                outcome.results.pop(key, None)
                outcome.errors.pop(key, None)
            self._report(job.batch, outcome, job, missing)
        except Exception as error:
            if not self.is_closing:
                logger.exception("Batch %s could not be run", job.batch)
            self._report(job.batch, Outcome(errors=dict.fromkeys(job.payloads, error)))
        finally:
            del self.jobs[job.batch]
            job.done.set_result(None)

    def _device_is_held(self) -> None:
        for job in self.jobs.values():
            if job.model.resources and not job.started and not job.fetching:
                self._must_wait(job, protocol.DEVICE)

    def _must_wait(self, job: Job, waits_for: str) -> None:
        """Let the scheduler know, unless it does, what a batch waits for."""
        job.fetching = waits_for == protocol.INPUTS
        if job.waits_for != waits_for:
            job.waits_for = waits_for
            self._tell_progress(job, waits_for)

    def _tell_progress(self, job: Job, waits_for: str) -> None:
        message: protocol.ProgressMessage = {
            "op": protocol.PROGRESS,
            "batch": job.batch,
            "waits_for": waits_for,
        }
        self.worker.batched_send(dict(message))

    def _execute(self, job: Job, inputs: dict[Key, Any]) -> Outcome:
        job.started = job.ended = monotonic()
        if job.waits_for:
            self.worker.loop.add_callback(self._tell_progress, job, "")
        if self.device.broken is not None:
            return Outcome(broken=self.device.broken)
        found = inputs if job.who_has else None
        items = [
            Item(key, partial(load_call, body, found))
            for key, body in job.payloads.items()
            if key not in job.dropped
        ]
        with self.loader.as_of(job.active):
            outcome = job.model.run(items, job.pass_sizes, job.pass_rows)
        job.ended = monotonic()
        if outcome.broken is not None:
            self.device.broken = outcome.broken
        return outcome

    def _report(
        self,
        batch: str,
        outcome: Outcome,
        job: Job | None = None,
        missing: set[Key] | frozenset[Key] = frozenset(),
    ) -> None:
        """Store results, and tell the scheduler how every request ended.

        A worker that is closing says nothing: when it has left, the scheduler has
        its requests run elsewhere.
        """
        if self.is_closing:
            return
        stimulus_id = f"daskinfer-done-{batch}"
        stored = store(self.worker, outcome.results, stimulus_id)
        again = [
            key
            for key, error in outcome.errors.items()
            if isinstance(error, MissingInput) and error.key in missing
        ]
        errors = {k: e for k, e in outcome.errors.items() if k not in again}
        message: dict[str, Any] = {
            "op": protocol.DONE,
            "batch": batch,
            **stored,
            "failed": stored["failed"] | dump_errors(errors),
            "missing": again,
            "passes": outcome.passes,
            "out_of_memory": outcome.out_of_memory,
            "waited": job.started - job.arrived if job else 0.0,
            "ran": job.ended - job.started if job else 0.0,
            "device": str(job.model.device.torch_device) if job else "",
            "pack": self._pack(stored, outcome, job.inline) if job else None,
            "struck": outcome.struck,
            "broken": "" if outcome.broken is None else describe(outcome.broken),
            "stimulus_id": stimulus_id,
        }
        self.worker.batched_send(message)

    # A device that is broken

    @guarded
    def replace(self, reason: str, stimulus_id: str) -> None:
        """Have the Nanny start this process anew."""
        logger.warning("Replacing the process of %s: %s", self.worker.address, reason)
        # Not as one of the worker's own background tasks: closing cancels those.
        self.worker.loop.add_callback(start_anew, self.worker, reason, stimulus_id)

    # Results

    def _pack(
        self, stored: dict[str, Any], outcome: Outcome, limit: int
    ) -> protocol.Pack | None:
        """What has just been stored, if all of it is small enough for a message."""
        if not stored["keys"] or sum(stored["nbytes"]) > limit:
            return None
        return packed([outcome.results[key] for key in stored["keys"]])

    async def fetch(self, keys: list[Key]) -> dict[str, Any]:
        """Pack small results into few buffers; large ones are left to Dask."""
        found = [key for key in keys if self._is_small(key)]
        pack = packed([self.worker.data[key] for key in found])
        if pack is None:
            return {**await self.fetch([]), "missing": keys}
        missing = list(set(keys).difference(found))
        return {"keys": found, "missing": missing, **pack}

    def _is_small(self, key: Key) -> bool:
        """Whether a result is here, and small enough to be packed."""
        ts = self.worker.state.tasks.get(key)
        return (
            ts is not None
            and ts.state == "memory"
            and ts.nbytes is not None
            and ts.nbytes <= self._packed_limit
        )
