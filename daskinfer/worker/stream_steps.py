"""Steps of streams: on the device in turns, or beside it; none takes too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer import config
from daskinfer.exceptions import StreamStalled
from daskinfer.wording import counted
from daskinfer.worker.async_producing import AsyncProducer
from daskinfer.worker.explaining import explain
from daskinfer.worker.producing import Emission
from daskinfer.worker.stream_run import JoinedRun, Run
from daskinfer.worker.turns import Turns

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.worker.device_queue import DeviceQueue
    from daskinfer.worker.execution import Item
    from daskinfer.worker.loading import Loader
    from daskinfer.worker.stream_sending import Sending

#: Seconds between looks at whether a turn has begun, and its short steps are over. It
#: is not told: that would wake the event loop once more for each turn, of which there
#: are hundreds a second, and only those that are late are looked at.
_POLL = 0.005


class Steps:
    """Has producers run on, a few steps at a time.

    Parameters
    ----------
    worker
        Whose they are.
    device
        Where they take turns with batches, and with each other.
    loader
        Knows what was active when a batch came.
    sending
        Given what came of a step that others are not to wait for.

    Attributes
    ----------
    slice
        Seconds after which a turn has no further step.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(
        self, worker: Worker, device: DeviceQueue, loader: Loader, sending: Sending
    ) -> None:
        self._worker = worker
        self._device = device
        self._loader = loader
        self._sending = sending
        self._turns = Turns()
        self.slice = config.given_seconds("streaming.slice")

    def __repr__(self) -> str:
        return f"<Steps of {self._worker.address} slice: {self.slice:g} s>"

    async def step(self, run: Run, dropped: list[Key]) -> list[Emission]:
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
        self._sending.deliver(run, emissions)
        self._sending.send(run)
        self._sending.broken(run, self._device.broken)
        return []

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
            self._sending.slots(run)
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
                emissions: list[Emission] = producer.advance(self.slice, run.paused)
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
            if not is_collected and now - started >= self.slice:
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
        self._sending.deliver(run, emissions)
        self._sending.send(run)

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
        self._sending.send(run)
        if isinstance(run.producer, AsyncProducer):
            self._worker._ongoing_background_tasks.call_soon(run.producer.close)

    def _explain(self, run: Run, emissions: list[Emission]) -> None:
        errors = {e.key: e.error for e in emissions if e.error is not None}
        for error in errors.values():
            if run.model.device.is_fatal(error):
                self._device.broken = error
        if errors:
            # Some may have ended meanwhile for another reason.
            items = [item for key in errors if (item := run.items.get(key))]
            explain(run.model, items, errors, self._worker)
            for emission in emissions:
                emission.error = errors.get(emission.key)
