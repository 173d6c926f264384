"""Taking turns on the device with tasks that ask Dask for it.

A user's task that declares ``resources={"NPU": 1}`` expects to have the device for
itself. Batches need no task slot, so Dask does not know of them: they take the
resource from the worker's own account while they run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from distributed.worker_state_machine import UnpauseEvent

if TYPE_CHECKING:
    from distributed import Worker

_STIMULUS = "daskinfer-device-free"


class ResourceAccount:
    """The resources of one worker, shared between its tasks and its batches.

    A batch reserves what it needs at once and starts when no task holds it any
    more; Dask starts no further task on a reserved resource. When the batch is
    over, tasks come first. So both get their turn, alternately if both are many.

    Parameters
    ----------
    worker
        Whose resources they are.
    must_wait
        Called when a batch has to wait for a task to end.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(self, worker: Worker, must_wait: Callable[[], None]) -> None:
        self._worker = worker
        self._must_wait = must_wait
        self._waiting: deque[tuple[Mapping[str, float], asyncio.Future[None]]] = deque()

    def __repr__(self) -> str:
        return f"<ResourceAccount waiting: {len(self._waiting)}>"

    @property
    def is_waited_for(self) -> bool:
        """Whether a batch waits for a task to end."""
        return bool(self._waiting)

    def declared(self, needed: Mapping[str, float]) -> dict[str, float]:
        """The part of ``needed`` that this worker has declared to have."""
        total = self._worker.state.total_resources
        return {name: amount for name, amount in needed.items() if name in total}

    @asynccontextmanager
    async def hold(self, needed: Mapping[str, float]) -> AsyncIterator[None]:
        """Keep tasks off the resources within the block."""
        if not needed:
            yield
            return
        self._change(needed, -1)
        try:
            if not self._free(needed):
                granted: asyncio.Future[None] = (
                    asyncio.get_running_loop().create_future()
                )
                self._waiting.append((needed, granted))
                self._must_wait()
                await granted
            yield
        finally:
            self._waiting = deque(w for w in self._waiting if not w[1].cancelled())
            self._change(needed, +1)
            self._offer_to_tasks()

    def task_ended(self) -> None:
        """A task may have given resources back."""
        while self._waiting and self._free(self._waiting[0][0]):
            _, granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)

    def _free(self, needed: Mapping[str, float]) -> bool:
        available = self._worker.state.available_resources
        return all(available.get(name, 0) > -1e-9 for name in needed)

    def _change(self, needed: Mapping[str, float], sign: int) -> None:
        # Both sides of Dask's account, whose balance is checked by validation.
        state = self._worker.state
        for name, amount in needed.items():
            state.available_resources[name] += sign * amount
            state.total_resources[name] += sign * amount

    def _offer_to_tasks(self) -> None:
        if self._worker.state.running:
            self._worker.handle_stimulus(UnpauseEvent(stimulus_id=_STIMULUS))
