"""The worker plugin: takes batches, runs them on the device, reports."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.metrics import monotonic

from daskinfer import config, protocol
from daskinfer.exceptions import InferenceError
from daskinfer.failure import origin
from daskinfer.guarding import guarded
from daskinfer.logs import Log
from daskinfer.streams import tune
from daskinfer.worker.cached_run import CachedRun
from daskinfer.worker.caching import Caches
from daskinfer.worker.device_queue import DeviceQueue
from daskinfer.worker.execution import Item, Outcome
from daskinfer.worker.exposition import COLLECTOR
from daskinfer.worker.inputs import fetch_inputs, load_call
from daskinfer.worker.job import Job
from daskinfer.worker.loading import Loader
from daskinfer.worker.recollection import Recollection
from daskinfer.worker.reporting import Reporter
from daskinfer.worker.restarting import start_anew
from daskinfer.worker.results import forget, pack_small
from daskinfer.worker.streaming import Streams, refuse_plain
from daskinfer.worker.telemetry import Telemetry

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.worker.execution import Call

logger = Log("runtime")


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
    caches
        Results that are kept.
    telemetry
        What its accelerators are doing.
    streams
        Answers that come piece by piece.
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
    caches: Caches
    telemetry: Telemetry
    streams: Streams
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
        self.caches = Caches(worker)
        self.loader = Loader(worker, self.device, self.caches)
        self.telemetry = Telemetry(worker, self.loader.models)
        self._reporter = Reporter(worker)
        self._recollection = Recollection(self.jobs)
        self.streams = Streams(worker, self.device, self.loader, self._reporter)
        self._packed_limit = config.nbytes("gather.small-limit")
        worker.stream_handlers.update(
            {
                protocol.RUN: self.run,
                protocol.DROP: self.drop,
                protocol.READ: self.read,
                protocol.LOAD: self.load,
                protocol.UNLOAD: self.unload,
                protocol.ACTIVATE: self.activate,
                protocol.REPLACE: self.replace,
            }
        )
        worker.handlers[protocol.FETCH] = self.fetch
        worker.handlers[protocol.RECALL] = self._recollection.recall
        worker.handlers[protocol.CACHE_STATISTICS] = self.caches.statistics
        worker.handlers[protocol.CACHE_CLEAR] = self.caches.clear
        COLLECTOR.add(self)
        tune(worker.batched_stream, config.seconds("send-interval") or 0.0)
        worker._ongoing_background_tasks.call_soon(self._say_hello)

    async def teardown(self, worker: Worker) -> None:
        """Let go of models and threads; what is not answered is run elsewhere."""
        self.is_closing = True
        COLLECTOR.discard(self)
        self.telemetry.close()
        self.streams.close()
        self.loader.close()
        self.device.close()
        await self.caches.close()

    def transition(self, key: Key, start: str, finish: str, **kwargs: Any) -> None:
        """Notice tasks that end and give the device back."""
        if start in ("executing", "long-running"):
            self.device.account.task_ended()

    async def _say_hello(self) -> None:
        report, room = await self.loader.detect()
        self.telemetry.found(report)
        message: protocol.HelloMessage = {
            "op": protocol.HELLO,
            "devices": {b.kind: b.kind for b in report.backends if b.count},
            "reasons": {b.kind: b.reason for b in report.backends if not b.count},
            "room": room,
        }
        self.worker.batched_send(dict(message))

    # Models

    @guarded
    def load(self, **message: Any) -> None:
        """Load and warm a version in the background, then report."""
        self.loader.load(message)

    @guarded
    def unload(
        self, name: str, version: str, unload: int, keep: bool, stimulus_id: str
    ) -> None:
        """Forget a version, and say so once its memory is free."""
        model = self.loader.find(name, version)
        jobs = [job.done for job in self.jobs.values() if job.model is model]
        self.loader.unload((name, version), unload, keep, jobs)

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
        contents: list[bytes | None],
        held: bool,
        streams: dict[Key, protocol.StreamOrder],
        idle_timeout: float | None,
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
            {k: c for k, c in zip(keys, contents, strict=False) if c is not None},
            held,
            monotonic(),
            self.loader.active,
            asyncio.get_running_loop().create_future(),
            streams=streams,
            idle_timeout=idle_timeout,
        )
        self.jobs[batch] = job
        # Of attempts of the past: the scheduler knows of no result by now.
        forget(self.worker, keys, stimulus_id)
        if any(key not in self.worker.data for key in who_has):
            job.fetching = True
            self._reporter.waits(job, protocol.INPUTS)
        elif self._is_held_up(job):
            self._reporter.waits(job, protocol.DEVICE)
        self.worker._ongoing_background_tasks.call_soon(self._run, job)

    @guarded
    def drop(self, batch: str, keys: list[Key], stimulus_id: str) -> None:
        """Some requests of a batch are not wanted any more."""
        job = self.jobs.get(batch)
        if job is not None:
            job.dropped.update(keys)
            self.streams.drop(batch, keys)

    @guarded
    def read(
        self, batch: str, keys: list[Key], taken: list[int], stimulus_id: str
    ) -> None:
        """Readers of streams have taken chunks."""
        self.streams.read(batch, keys, taken)

    async def _run(self, job: Job) -> None:
        try:
            inputs, missing = await fetch_inputs(self.worker, job.who_has)
            job.fetching = False
            outcome = await self._answer(job, inputs)
            for key in job.dropped:
                outcome.results.pop(key, None)
                outcome.errors.pop(key, None)
            refuse_plain(job, outcome)
            self._report(job.batch, outcome, job, missing)
            if outcome.flows:
                await self.streams.run(job, outcome.flows)
            if outcome.joining:
                await self.streams.join(job, outcome.joining)
        except Exception as error:
            if not self.is_closing:
                self._tell_failed(job, error)
            self._report(job.batch, Outcome(errors=dict.fromkeys(job.payloads, error)))
        finally:
            del self.jobs[job.batch]
            self._recollection.ended(job)
            job.done.set_result(None)

    def _tell_failed(self, job: Job, error: Exception) -> None:
        told = "Batch %s could not be run: %s"
        logger.error(told, job.batch, origin(error), **job.about)
        logger.debug(told, job.batch, origin(error), exc_info=error, **job.about)

    def _device_is_held(self) -> None:
        for job in self.jobs.values():
            if self._is_held_up(job):
                self._reporter.waits(job, protocol.DEVICE)

    def _is_held_up(self, job: Job) -> bool:
        """Whether a batch that needs the device waits for a task to give it back."""
        return (
            bool(job.model.resources)
            and job.started is None
            and not job.held
            and not job.fetching
            and self.device.account.is_waited_for
        )

    def _looks_long(self, job: Job) -> None:
        """A batch may need the device and does not yet; of others that is known."""
        if not job.held:
            self._reporter.waits(job, protocol.CACHE)

    def _not_found(self, job: Job, dropped: bytes) -> None:
        """Not all of a batch is in the cache: it needs the device."""
        if job.held:
            self._reporter.not_found(job, dropped)
        if self._is_held_up(job):
            self._reporter.waits(job, protocol.DEVICE)

    async def _answer(self, job: Job, inputs: dict[Key, Any]) -> Outcome:
        if job.model.kind == protocol.STEPS:
            # They wait for the device with all others of their model.
            return Outcome(joining=_items(job, inputs, job.payloads, {}))
        execute = partial(self._execute, job, inputs)
        on_device = partial(self.device.run, job.model.resources)
        cache = self.caches.asked(job)
        if cache is None:
            self._not_found(job, b"")
            outcome: Outcome = await on_device(execute)
            return outcome
        run = CachedRun(
            self.caches,
            cache,
            job,
            execute,
            on_device,
            partial(self._looks_long, job),
            partial(self._not_found, job),
        )
        return await run.answer(inputs)

    def _execute(
        self,
        job: Job,
        inputs: dict[Key, Any],
        keys: Collection[Key] | None = None,
        calls: Mapping[Key, Call] = MappingProxyType({}),
    ) -> Outcome:
        """Run a batch, or some of its requests (on the device's thread)."""
        job.begin(monotonic())
        if job.waits_for:
            self.worker.loop.add_callback(self._reporter.begins, job)
        if self.device.broken is not None:
            return Outcome(broken=self.device.broken)
        items = _items(job, inputs, job.payloads if keys is None else keys, calls)
        with self.loader.as_of(job.active):
            outcome = job.model.run(items, job.pass_sizes, job.pass_rows, job.about)
        job.ended = monotonic()
        if outcome.flows and job.model.kind == protocol.PLAIN:
            job.model.kind = protocol.STREAM
        if outcome.broken is not None:
            self.device.broken = outcome.broken
        return outcome

    def _report(self, batch: str, outcome: Outcome, *about: Any) -> None:
        """Say how every request of a batch ended, as :meth:`Reporter.done` does.

        A worker that is closing says nothing: when it has left, the scheduler has
        its requests run elsewhere.
        """
        if not self.is_closing:
            self._reporter.done(batch, outcome, *about)

    # A device that is broken

    @guarded
    def replace(self, reason: str, stimulus_id: str) -> None:
        """Have the Nanny start this process anew."""
        logger.warning(
            "Replacing the process of %s: %s",
            *(self.worker.address, reason),
            stimulus_id=stimulus_id,
            limited=False,
        )
        # Not as one of the worker's own background tasks: closing cancels those.
        self.worker.loop.add_callback(start_anew, self.worker, reason, stimulus_id)

    # Results

    async def fetch(self, keys: list[Key]) -> dict[str, Any]:
        """Pack small results into few buffers; large ones are left to Dask."""
        return pack_small(self.worker, keys, self._packed_limit)


def _items(
    job: Job, inputs: dict[Key, Any], keys: Iterable[Key], calls: Mapping[Key, Call]
) -> list[Item]:
    """The requests of a batch that are still wanted, to be unpickled where they run."""
    found = inputs if job.who_has else None
    return [
        Item(key, partial(calls.__getitem__, key))
        if key in calls
        else Item(key, partial(load_call, job.payloads[key], found))
        for key in keys
        if key not in job.dropped
    ]
