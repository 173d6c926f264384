"""The queue before a worker's device: one thread, one thing at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distributed.threadpoolexecutor import ThreadPoolExecutor
from distributed.worker import _worker_cvar

from daskinfer.worker.resources import ResourceAccount
from daskinfer.worker.threads import run_on

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.device import Device

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
    must_wait
        Called when what is next has to wait for a task that holds its resources.

    Attributes
    ----------
    broken
        Why nothing runs on the device any more; None while all is well.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(
        self, worker: Worker, must_wait: Callable[[], None] = lambda: None
    ) -> None:
        self.broken: BaseException | None = None
        self.account = ResourceAccount(worker, must_wait)
        self._worker = worker
        self._turn = asyncio.Lock()
        self._taken = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Dask's, whose threads are daemons: a model that hangs must not keep the
        # process from ending.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="daskinfer-device")

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
        self._taken += 1
        self._idle.clear()
        try:
            if not needed:
                return await self._run(function, *args)
            async with self._turn, self.account.hold(needed):
                return await self._run(function, *args)
        finally:
            self._taken -= 1
            if not self._taken:
                self._idle.set()

    async def idle(self, within: float) -> None:
        """Wait until nothing runs or waits here, for so many seconds at most."""
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._idle.wait(), within)

    @contextlib.contextmanager
    def breaking(self, device: Device) -> Iterator[None]:
        """Notice an error after which nothing runs on the device any more."""
        try:
            yield
        except Exception as error:
            if device.is_fatal(error):
                self.broken = error
            raise

    def close(self) -> None:
        """Take nothing more, and wait for nothing."""
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await run_on(self._thread, _as_worker, self._worker, function, *args)


def _as_worker(worker: Worker, function: Callable[..., Any], *args: Any) -> Any:
    _worker_cvar.set(worker)
    _here.worker = worker
    return function(*args)
