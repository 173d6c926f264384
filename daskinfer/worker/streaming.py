"""Answers that come piece by piece: steps on the device, chunks on their way."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.utils import offload

from daskinfer import config
from daskinfer.exceptions import StreamStalled
from daskinfer.failure import contain, origin
from daskinfer.logs import Log
from daskinfer.wording import counted
from daskinfer.worker.async_producing import AsyncProducer, AsyncThread
from daskinfer.worker.generating import GeneratorProducer
from daskinfer.worker.live import Live, Part
from daskinfer.worker.producing import Emission
from daskinfer.worker.stream_run import JoinedRun, Run
from daskinfer.worker.turns import Turns

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

#: Seconds between looks at whether a turn has begun, and its short steps are over.
_POLL = 0.005


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

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(
        self, worker: Worker, device: DeviceQueue, loader: Loader, reporter: Reporter
    ) -> None:
        self._worker = worker
        self._device = device
        self._loader = loader
        self._reporter = reporter
        self._turns = Turns()
        self._slice = config.given_seconds("streaming.slice")
        self._runs: dict[str, list[Run]] = {}
        self._joined: dict[int, JoinedRun] = {}
        self._threads: weakref.WeakSet[AsyncThread] = weakref.WeakSet()
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<Streams of {self._worker.address}: {counted(self.count, 'stream')}>"

    @property
    def count(self) -> int:
        """How many are live."""
        runs = {id(run): run for runs in self._runs.values() for run in runs}
        return sum(len(run.lives) for run in runs.values())

    def close(self) -> None:
        """Send nothing more."""
        self._is_closing = True
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
            self._send(run)
            run.changed.set()

    def _in_background(self, function: Callable[..., Any], *args: Any) -> None:
        self._worker._ongoing_background_tasks.call_soon(function, *args)

    def _thread(self, model: ResidentModel) -> AsyncThread:
        if model.thread is None:
            model.thread = AsyncThread(self._worker, model.device)
            self._threads.add(model.thread)
        return model.thread

    # Steps

    async def _drive(self, run: Run) -> None:
        producer = run.producer
        try:
            if isinstance(producer, GeneratorProducer):
                self._deliver(run, producer.begun())
            while run.lives and not self._is_closing:
                run.changed.clear()
                self._send(run)
                dropped = run.dropped()
                run.paused = {key for key, live in run.lives.items() if live.paused}
                if run.coming or dropped or run.may_step():
                    self._deliver(run, await self._step(run, dropped))
                elif run.lives:
                    await run.changed.wait()
        except Exception as error:
            if not self._is_closing:
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
        while run.lives and not self._is_closing:
            run.changed.clear()
            self._send(run)
            run.dropped()
            if run.lives:
                await run.changed.wait()

    async def _step(self, run: Run, dropped: list[Key]) -> list[Emission]:
        """Have a producer run on, for a few steps."""
        if isinstance(run.producer, AsyncProducer):
            emissions = await self._limited(run, self._step_beside(run, dropped))
        else:
            emissions = await self._step_on_device(run, dropped)
        if self._device.broken is None:
            return emissions
        # What came before it broke is as good as ever.
        for emission in emissions:
            if emission.error is not None:
                emission.ended, emission.error = False, None
        self._deliver(run, emissions)
        self._send(run)
        return self._broken(run)

    async def _step_on_device(self, run: Run, dropped: list[Key]) -> list[Emission]:
        async with self._turns.turn(run.share):
            if self._device.broken is not None:
                return []
            # Who has left goes first: it may be among those that come.
            dropped += run.dropped()
            coming, run.coming = run.coming, []
            turn = self._device.run(
                run.model.resources, self._turn, run, dropped, coming
            )
            emissions = await self._limited(run, turn)
            self._tell_slots(run)
            return emissions

    def _turn(self, run: Run, dropped: list[Key], coming: list[Item]) -> list[Emission]:
        """The same on the device's thread."""
        producer: Any = run.producer
        run.started = began = perf_counter()
        try:
            with self._loader.as_of(run.job.active):
                if dropped:
                    producer.drop(dropped)
                if coming:
                    producer.add(coming)
                emissions: list[Emission] = producer.advance(self._slice, run.paused)
        finally:
            run.started = None
            run.share.used += perf_counter() - began
        if isinstance(run, JoinedRun) and producer.broken is not None:
            self._device.broken = producer.broken
        self._explain(run, emissions)
        return emissions

    async def _step_beside(self, run: Run, dropped: list[Key]) -> list[Emission]:
        """The same beside the device."""
        producer: Any = run.producer
        run.started = perf_counter()
        try:
            await producer.drop(dropped)
            emissions: list[Emission] = await producer.advance()
        finally:
            run.started = None
        self._explain(run, emissions)
        return emissions

    async def _limited(self, run: Run, steps: Any) -> list[Emission]:
        """Await steps, and end the streams if a step takes longer than it may."""
        stepping = asyncio.ensure_future(steps)
        limit = math.inf if run.idle_timeout is None else run.idle_timeout
        is_collected = isinstance(run.producer, AsyncProducer)
        wait = min(_POLL, limit)
        while not stepping.done() and wait < math.inf:
            await asyncio.wait({stepping}, timeout=wait)
            # Once each: the device's thread sets them.
            started, step, now = run.started, run.producer.at_work, perf_counter()
            if stepping.done() or started is None:
                # Until its turn comes it is not the model that is late.
                continue
            left = limit if step is None else step.began + limit - now
            if step is not None and left <= 0:
                self._stalled(run, step.keys, limit)
                left = limit
            if not is_collected and now - started >= self._slice:
                # Its last step takes long. What came of the others must not wait.
                is_collected = True
                self._collect(run)
            wait = left if is_collected else _POLL
        emissions: list[Emission] = await stepping
        return emissions

    def _collect(self, run: Run) -> None:
        collect = getattr(run.producer, "collect", list)
        emissions: list[Emission] = collect()
        self._explain(run, emissions)
        self._deliver(run, emissions)
        self._send(run)

    def _stalled(self, run: Run, keys: Iterable[Key], limit: float) -> None:
        late = [run.lives[key] for key in keys if key in run.lives]
        for live in late:
            if not live.ended:
                live.fail(
                    StreamStalled(
                        f"{run.model.name!r} gave {live.key!r} no chunk for {limit:g} "
                        f"s, after {counted(live.count, 'chunk')}: see what holds it "
                        "up, or allow more with StreamPolicy(idle_timeout=)",
                        key=live.key,
                        name=run.model.name,
                        version=run.model.version,
                        worker=self._worker.address,
                        chunks=live.count,
                    )
                )
                run.failed.append(live.key)
        self._send(run)
        if isinstance(run.producer, AsyncProducer):
            self._in_background(run.producer.close)

    def _explain(self, run: Run, emissions: list[Emission]) -> None:
        errors = {e.key: e.error for e in emissions if e.error is not None}
        for error in errors.values():
            if run.model.device.is_fatal(error):
                self._device.broken = error
        if errors:
            # Some may have ended meanwhile for another reason.
            items = [item for key in errors if (item := run.items.get(key))]
            run.model.explain(items, errors, self._worker)
            for emission in emissions:
                emission.error = errors.get(emission.key)

    async def _end(self, run: Run) -> None:
        """Let go of the model."""
        if self._is_closing or not run.producer.live:
            return
        if isinstance(run.producer, AsyncProducer):
            await run.producer.close()
        else:
            await self._device.run(run.model.resources, run.producer.close)

    # What comes

    def _deliver(self, run: Run, emissions: list[Emission]) -> None:
        for emission in emissions:
            live = run.lives.get(emission.key)
            if live is None or run.is_to_come(emission.key):
                continue
            if not (live.dropped or live.ended):
                live.take(emission)
                if live.ended and not emission.ended:
                    run.failed.append(live.key)

    def _send(self, run: Run) -> None:
        """Send what may be sent, and tell who has ended."""
        if self._is_closing:
            return
        parts: list[Part] = []
        for live in run.lives.values():
            if live.dropped:
                continue
            had_ended, part = live.ended, live.part()
            if live.ended and not had_ended:
                run.failed.append(live.key)
            if part is not None:
                parts.append(part)
        for job, its in run.by_job(parts):
            self._reporter.chunks(job.batch, its)
        over = [live for live in run.lives.values() if live.is_over]
        for job, ended in run.by_job([live for live in over if not live.dropped]):
            self._tell_ended(job, ended)
        for live in over:
            run.remove(live.key)

    def _tell_slots(self, run: Run) -> None:
        if isinstance(run, JoinedRun) and run.learned():
            slots = run.model.producer.slots
            self._reporter.slots(run.model, slots.limit, slots.seconds)

    def _tell_ended(self, job: Job, over: Sequence[Live]) -> None:
        for live in over:
            if live.is_combined and live.error is None:
                self._in_background(self._combine, job, live)
        plain = [x for x in over if not x.is_combined or x.error is not None]
        results = {x.key: x.whole() for x in plain if x.error is None}
        errors = {x.key: x.error for x in plain if x.error is not None}
        if plain:
            self._reporter.ended(job, plain, results, errors)

    async def _combine(self, job: Job, live: Live) -> None:
        """Let code of the user's make a result, on a thread that has time."""
        results, errors = {}, {}
        try:
            results[live.key] = await offload(contain, live.whole)
        except Exception as error:
            errors[live.key] = error
        if not self._is_closing:
            self._reporter.ended(job, [live], results, errors)

    def _broken(self, run: Run) -> list[Emission]:
        """Nothing runs on the device any more: the scheduler knows what there was."""
        assert self._device.broken is not None
        for key in list(run.lives):
            run.remove(key)
        if not self._is_closing:
            self._reporter.broken(run.job, self._device.broken)
        return []


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
