"""Answers that come piece by piece: from their beginning on a worker to their end."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer.failure import origin
from daskinfer.logs import Log
from daskinfer.wording import counted
from daskinfer.worker.async_producing import AsyncProducer, AsyncThread
from daskinfer.worker.generating import GeneratorProducer
from daskinfer.worker.stream_run import JoinedRun, Run
from daskinfer.worker.stream_sending import Sending
from daskinfer.worker.stream_steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker

    from daskinfer.worker.device_queue import DeviceQueue
    from daskinfer.worker.execution import Item, Outcome
    from daskinfer.worker.flow import Flow
    from daskinfer.worker.job import Job
    from daskinfer.worker.loading import Loader
    from daskinfer.worker.models import ResidentModel
    from daskinfer.worker.reporting import Reporter

logger = Log("streaming")


class Streams:
    """Has the streams of a worker run on, and sends what comes.

    Parameters
    ----------
    worker
        Whose they are.
    device
        Where they take turns with batches, and with each other.
    loader
        Knows what was active when a batch came.
    reporter
        Sends what there is to tell.

    Attributes
    ----------
    steps
        Has them step.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(
        self, worker: Worker, device: DeviceQueue, loader: Loader, reporter: Reporter
    ) -> None:
        self._worker = worker
        self._device = device
        self._sending = Sending(worker, reporter)
        self.steps = Steps(worker, device, loader, self._sending)
        self._runs: dict[str, list[Run]] = {}
        self._joined: dict[int, JoinedRun] = {}
        self._threads: weakref.WeakSet[AsyncThread] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<Streams of {self._worker.address}: {counted(self.count, 'stream')}>"

    @property
    def count(self) -> int:
        """How many are live."""
        runs = {id(run): run for runs in self._runs.values() for run in runs}
        return sum(len(run.lives) for run in runs.values())

    def close(self) -> None:
        """Send nothing more."""
        self._sending.is_closing = True
        for runs in self._runs.values():
            for run in runs:
                run.changed.set()
        for thread in self._threads:
            thread.close()

    async def join(self, job: Job, items: Sequence[Item]) -> None:
        """Have requests join those that step together, and wait for their end."""
        run = self._joined.get(id(job.model))
        if run is None:
            run = self._joined[id(job.model)] = JoinedRun(job)
            self._in_background(self._drive, run)
        ended = run.join(job, items)
        self._runs[job.batch] = [run]
        try:
            await ended
        finally:
            del self._runs[job.batch]

    async def run(self, job: Job, flows: Sequence[Flow]) -> None:
        """Have what a batch has begun run to its end."""
        plain = [flow for flow in flows if not hasattr(flow.outputs, "__anext__")]
        runs = [Run(GeneratorProducer(plain), job, _items(plain))] if plain else []
        for flow in flows:
            if flow not in plain:
                producer = AsyncProducer(flow, self._thread(job.model))
                runs.append(Run(producer, job, _items([flow])))
        self._runs[job.batch] = runs
        try:
            await asyncio.gather(*map(self._drive, runs))
        finally:
            del self._runs[job.batch]

    def drop(self, batch: str, keys: Iterable[Key]) -> None:
        """Nobody wants some streams any more."""
        for run in self._runs.get(batch, ()):
            for key in keys:
                if (live := run.lives.get(key)) is not None:
                    live.dropped = True
                    run.paused.add(key)
            if isinstance(run.producer, AsyncProducer):
                # It may wait for what never comes.
                self._in_background(run.producer.drop, keys)
            run.changed.set()

    def read(self, batch: str, keys: list[Key], taken: list[int]) -> None:
        """Readers have taken so many chunks."""
        for run in self._runs.get(batch, ()):
            for key, count in zip(keys, taken, strict=True):
                if (live := run.lives.get(key)) is not None:
                    live.taken(count)
            # Not only when the step at hand is done.
            self._sending.send(run)
            run.changed.set()

    def _in_background(self, function: Callable[..., Any], *args: Any) -> None:
        self._worker._ongoing_background_tasks.call_soon(function, *args)

    def _thread(self, model: ResidentModel) -> AsyncThread:
        if model.thread is None:
            model.thread = AsyncThread(self._worker, model.device)
            self._threads.add(model.thread)
        return model.thread

    # Running

    async def _drive(self, run: Run) -> None:
        producer = run.producer
        try:
            if isinstance(producer, GeneratorProducer):
                self._sending.deliver(run, producer.begun())
            while run.lives and not self._sending.is_closing:
                run.changed.clear()
                self._sending.send(run)
                dropped = run.dropped()
                run.paused = {key for key, live in run.lives.items() if live.paused}
                if run.coming or dropped or run.may_step():
                    self._sending.deliver(run, await self.steps.step(run, dropped))
                elif run.lives:
                    await run.changed.wait()
        except Exception as error:
            if not self._sending.is_closing:
                told = "%r could not go on: %s"
                logger.error(told, run, origin(error), **run.job.about)
            for live in run.lives.values():
                live.fail(error)
        # At once: who comes from now on begins anew.
        self._joined.pop(id(run.model), None)
        await self._end(run)
        await self._hand_out(run)
        run.close()

    async def _hand_out(self, run: Run) -> None:
        """Let readers have what came before the model could not go on."""
        while run.lives and not self._sending.is_closing:
            run.changed.clear()
            self._sending.send(run)
            run.dropped()
            if run.lives:
                await run.changed.wait()

    async def _end(self, run: Run) -> None:
        """Let go of the model."""
        if self._sending.is_closing or not run.producer.live:
            return
        if isinstance(run.producer, AsyncProducer):
            await run.producer.close()
        else:
            await self._device.run(run.model.resources, run.producer.close)


def _items(flows: Iterable[Flow]) -> dict[Key, Item]:
    return {key: item for flow in flows for key, item in flow.asked.items()}


def refuse_plain(job: Job, outcome: Outcome) -> None:
    """Fail requests whose answers are to be streamed, where the model gave one each."""
    for key in job.streams.keys() & outcome.results.keys():
        given = type(outcome.results.pop(key)).__name__
        outcome.errors[key] = TypeError(
            f"{job.model.name!r} does not answer piece by piece: it returned a "
            f"value of type {given}, and no iterator; call it, or use submit"
        )
