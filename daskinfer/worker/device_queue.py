"""The queue before a worker's device: one thread, one thing at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from distributed.worker import _worker_cvar

from daskinfer.failure import contain
from daskinfer.worker.resources import ResourceAccount

if TYPE_CHECKING:
    from distributed import Worker

_here = threading.local()


def current_worker() -> Worker | None:
    """The worker whose device the calling thread runs, if it runs one."""
    return getattr(_here, "worker", None)


class DeviceQueue:
    """Runs functions on the device's own thread, in the order in which they came.

    Parameters
    ----------
    worker
        Whose device it is. :func:`distributed.get_worker` works on the thread.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(self, worker: Worker) -> None:
        self.account = ResourceAccount(worker)
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(
            1, "daskinfer-device", initializer=_enter, initargs=(worker,)
        )

    def __repr__(self) -> str:
        return f"<DeviceQueue busy: {self._turn.locked()} {self.account!r}>"

    async def run(
        self, needed: Mapping[str, float], function: Callable[..., Any], *args: Any
    ) -> Any:
        """Run a function on the thread, with tasks kept off what it needs.

        Where nothing is needed, the thread itself is the queue: its next function
        then starts without a detour over the event loop.

        Parameters
        ----------
        needed
            Resources that the worker has declared.
        function, args
            What to run.
        """
        loop = asyncio.get_running_loop()
        if not needed:
            return await loop.run_in_executor(self._thread, contain, function, *args)
        async with self._turn, self.account.hold(needed):
            return await loop.run_in_executor(self._thread, contain, function, *args)

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function after all that waits, and wait for nothing."""
        self._thread.submit(function)

    def close(self) -> None:
        """Start nothing more; what runs, ends."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _enter(worker: Worker) -> None:
    _worker_cvar.set(worker)
    _here.worker = worker
