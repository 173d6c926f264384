"""The cluster's worker processes, and what is done to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter

from distributed import Nanny, Scheduler

from scheduler_plugins import InferencePlugin
from scheduler_plugins.line import Batch
from tests.chaos.plan import LIMITED, Event, Kind, Plan

_POLL_SECONDS = 0.01
#: How long it is waited for a worker that runs what a frozen one should.
_CHOOSY_SECONDS = 1.0


class Workers:
    """Worker processes under nannies.

    Parameters
    ----------
    scheduler
        What they are connected to, in this process.

    Attributes
    ----------
    done
        How often what was done to them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.done: Counter[str] = Counter()
        self._scheduler = scheduler
        self._nannies: list[Nanny] = []
        self._numbers = itertools.count()
        self._frozen: set[int] = set()

    async def start(self, count: int) -> None:
        """Start so many more."""
        await asyncio.gather(*(self._join() for _ in range(count)))

    async def play(self, plan: Plan) -> None:
        """Do what the plan says when it is time."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        lasting = []
        for event in plan.events:
            await asyncio.sleep(max(start + event.at - loop.time(), 0))
            lasting.append(asyncio.create_task(self._do(event)))
        await asyncio.gather(*lasting)

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(nanny.close() for nanny in self._nannies))

    async def _do(self, event: Event) -> None:
        if event.kind is Kind.JOIN:
            await self._join()
        else:
            nanny = await self._victim(event)
            print(f"{event.at:6.1f} s: {event.kind.value} {nanny.name}", flush=True)
            if event.kind is Kind.KILL:
                os.kill(_pid(nanny), signal.SIGKILL)
            elif event.kind is Kind.FREEZE:
                await self._freeze(_pid(nanny), event.seconds)
            else:
                await self._retire(nanny)
        self.done[event.kind.value] += 1

    async def _join(self) -> None:
        nanny = Nanny(
            self._scheduler.address,
            nthreads=1,
            name=f"w{next(self._numbers)}",
            validate=True,
        )
        await nanny
        self._nannies.append(nanny)

    async def _retire(self, nanny: Nanny) -> None:
        self._nannies.remove(nanny)
        await self._scheduler.retire_workers([nanny.worker_address])
        await nanny.close()

    async def _freeze(self, pid: int, seconds: float) -> None:
        self._frozen.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._frozen.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _victim(self, event: Event) -> Nanny:
        loop = asyncio.get_running_loop()
        choosy_until = loop.time() + _CHOOSY_SECONDS
        while True:
            found = [
                nanny for nanny in self._nannies if self._is_fit(nanny, event.kind)
            ]
            if event.kind is Kind.FREEZE and loop.time() < choosy_until:
                # So that a batch is beyond its time limit.
                limited = {
                    b.device.name for b in self._batches() if b.line.name == LIMITED
                }
                found = [nanny for nanny in found if nanny.worker_address in limited]
            if found:
                return found[int(event.victim * len(found))]
            await asyncio.sleep(_POLL_SECONDS)

    def _is_fit(self, nanny: Nanny, kind: Kind) -> bool:
        if nanny.pid is None or nanny.worker_address not in self._scheduler.workers:
            return False  # on its way up, or down
        if _pid(nanny) in self._frozen:
            return False
        return kind is not Kind.KILL or not self._looks_guilty(nanny.worker_address)

    def _looks_guilty(self, address: str) -> bool:
        """Whether a request runs there that was alone already when a worker died.

        Were it killed so twice, nothing would tell it from the cause.
        """
        return any(
            request.solo
            for batch in self._batches()
            if batch.device.name == address
            for request in batch.requests.values()
        )

    def _batches(self) -> list[Batch]:
        plugin = self._scheduler.plugins[InferencePlugin.name]
        assert isinstance(plugin, InferencePlugin)
        return list(plugin.dispatcher.running.batches.values())


def _pid(nanny: Nanny) -> int:
    assert nanny.pid is not None
    return nanny.pid
