"""Letting go of models, and saying so once their memory is free."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from daskinfer import protocol

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.worker.models import ResidentModel


async def unload(
    worker: Worker,
    model: ResidentModel | None,
    pending: Iterable[asyncio.Future[Any]],
    about: dict[str, Any],
) -> None:
    """Free what a model takes, and report it.

    Parameters
    ----------
    worker
        Whose model it is.
    model
        What was loaded, and is known to nobody any more but to batches that have come.
    pending
        Those batches, and the load if it is under way still.
    about
        Which version it is, and the number of the message that asked for this.
    """
    waited_for = set(pending)
    if waited_for:
        await asyncio.wait(waited_for)
    waited_for.clear()
    if model is not None:
        is_alive = _watch(model.function)
        empty_cache = model.device.empty_cache
        del model
        # Not on the device's thread, which may be busy with another model for long.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, _free, is_alive, empty_cache)
    worker.batched_send({"op": protocol.UNLOADED, **about})


def _free(is_alive: Callable[[], bool], empty_cache: Callable[[], None]) -> None:
    if is_alive():
        # In a cycle with itself, as some modules are. Looking takes a while.
        gc.collect()
    empty_cache()


def _watch(function: Any) -> Callable[[], bool]:
    try:
        reference = weakref.ref(function)
    except TypeError:
        return lambda: True
    return lambda: reference() is not None
