"""Asynchronous generators, which do not keep the device while they wait."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Collection, Coroutine
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from distributed.worker import _worker_cvar

from daskinfer.exceptions import InferenceError
from daskinfer.failure import origin
from daskinfer.wording import counted
from daskinfer.worker.flow import END, Flow, logger
from daskinfer.worker.producing import AtWork, Emission

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Worker

    from daskinfer.device import Device

T = TypeVar("T")


class AsyncThread:
    """An event loop in a thread of its own, with a device at hand.

    It ends when nobody has this object any more: with the model that it is for, which
    may keep what belongs to the loop.

    Parameters
    ----------
    worker
        :func:`distributed.get_worker` gives it on the thread.
    device
        Where models compute.
    """

    def __init__(self, worker: Worker, device: Device) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run,
            args=(self._loop, worker, device),
            name="daskinfer-async",
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self._loop)
        self._end.atexit = False

    def __repr__(self) -> str:
        return f"<AsyncThread running: {self._loop.is_running()}>"

    def call(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run a coroutine there; await it on the loop that runs here."""
        return asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        )

    def close(self) -> None:
        """Take nothing more, and wait for nothing."""
        self._end()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop, worker: Worker, device: Device) -> None:
    import torch

    _worker_cvar.set(worker)
    # For good: steps of generators alternate, and their contexts would not nest.
    with device.active(), torch.inference_mode():
        loop.run_forever()
    if not asyncio.all_tasks(loop):
        loop.close()


class AsyncProducer:
    """The requests that one asynchronous generator answers.

    As :class:`~daskinfer.worker.producing.Producer`, but awaited on the worker's event
    loop instead of called on the device's thread. Requests can be dropped at any time.

    Parameters
    ----------
    flow
        Its outputs.
    thread
        Where it runs.
    """

    joins = False

    def __init__(self, flow: Flow, thread: AsyncThread) -> None:
        self._flow = flow
        self._thread = thread
        self._outputs = flow.outputs
        self._live = dict.fromkeys(flow.wanted)
        self._unwanted: set[Key] = set()
        self._task: asyncio.Task[Any] | None = None
        self.at_work: AtWork | None = None

    def __repr__(self) -> str:
        return f"<AsyncProducer of {counted(len(self.live), 'request')}>"

    @property
    def live(self) -> list[Key]:
        """The requests that have not ended."""
        return list(self._live)

    async def drop(self, keys: Collection[Key]) -> None:
        """Close the generator if nothing of it is wanted any more."""
        for key in keys:
            self._live.pop(key, None)
            self._unwanted.add(key)
        if not self._live:
            await self.close()

    async def advance(self) -> list[Emission]:
        """Take the next output; nothing comes if all is dropped meanwhile."""
        self.at_work = AtWork(self.live, perf_counter())
        try:
            emissions = await self._thread.call(self._take())
        except asyncio.CancelledError:
            if self._live:
                raise
            return []
        except Exception as error:
            emissions = [Emission(key, ended=True, error=error) for key in self._live]
            await self.close()
        finally:
            self.at_work = None
        for emission in emissions:
            if emission.ended:
                self._live.pop(emission.key, None)
        return emissions

    async def close(self) -> None:
        """Have the generator stop where it is."""
        self._live.clear()
        try:
            await self._thread.call(self._end())
        except Exception as error:
            told = "A model raised %s as it was stopped"
            logger.info(told, origin(error), **self._flow.about)

    # On the thread

    async def _take(self) -> list[Emission]:
        import torch

        self._task = asyncio.current_task()
        self._flow.drop(self._unwanted)
        try:
            output = await anext(self._outputs, END)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            told = f"the model would end its process: {error!r}"
            raise InferenceError(told) from error
        # Results must not be tensors of inference mode.
        with torch.inference_mode(False):
            return self._flow.ended() if output is END else self._flow.give(output)

    async def _end(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        self._flow.close()
        await self._outputs.aclose()
