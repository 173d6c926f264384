"""A nanny that sets the environment of a device's worker process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Mapping

import distributed
from distributed import Nanny

# os.environ belongs to the whole process, and clusters may start in several threads.
_environment_lock = threading.Lock()
_POLL_SECONDS = 0.005


class DeviceNanny(Nanny):
    """A nanny whose ``env=`` is in place before its worker process starts.

    Dask's own sets it in the running process, where a main script that was imported
    again may have read it already; device visibility and thread counts are read once.
    The nanny's own process has its environment back as soon as the worker's exists.
    One that is closing starts no process, whoever has asked it to restart.
    """

    async def instantiate(self) -> distributed.Status:
        """Start the worker process and wait until it is connected."""
        if self.status in (distributed.Status.closing, distributed.Status.closed):
            return self.status
        # Dask sets these itself before it starts the process, over what is there.
        self.pre_spawn_env = self.env
        async with _environment(self.env):
            starting = asyncio.ensure_future(super().instantiate())
            try:
                while not starting.done() and not self._has_process():
                    await asyncio.sleep(_POLL_SECONDS)
            except asyncio.CancelledError:
                starting.cancel()
                raise
        return await starting

    def _has_process(self) -> bool:
        return self.process is not None and self.process.pid is not None


@contextlib.asynccontextmanager
async def _environment(variables: Mapping[str, str]) -> AsyncIterator[None]:
    while not _environment_lock.acquire(blocking=False):
        await asyncio.sleep(_POLL_SECONDS)
    try:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
    finally:
        _environment_lock.release()
