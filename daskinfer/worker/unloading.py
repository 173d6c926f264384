"""Letting go of models, and saying so once their memory is free."""

from __future__ import annotations

import asyncio
import gc
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskinfer import protocol
from daskinfer.failure import describe
from daskinfer.logs import Log

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.worker.caching import Caches
    from daskinfer.worker.device_queue import DeviceQueue
    from daskinfer.worker.models import ResidentModel
    from daskinfer.worker.parking import Parking, Which

logger = Log("unloading")


class Unloader:
    """Frees what models take of the device; keeps some in the host's memory.

    Parameters
    ----------
    worker
        Whose models they are.
    device
        On whose thread they move, so that none is in use meanwhile.
    parking
        Where they are kept.
    caches
        What gives memory of the host back when it is short; parked models do so too.
    is_awaited
        Whether the device's thread waits for a model that is not there yet.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(
        self,
        worker: Worker,
        device: DeviceQueue,
        parking: Parking,
        caches: Caches,
        is_awaited: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._caches = caches
        self._device = device
        self._parking = parking
        self._is_awaited = is_awaited
        self._under_way: dict[int, _Unload] = {}
        self._moves: set[_Move] = set()
        self._warned = False

    def __repr__(self) -> str:
        return f"<Unloader under way: {len(self._under_way)}>"

    def begin(
        self,
        which: Which,
        number: int,
        model: ResidentModel | None,
        pending: Iterable[asyncio.Future[Any]],
        keep: bool,
    ) -> None:
        """Free what a version takes, and report it.

        Parameters
        ----------
        which, number
            The version, and the number of the message that asked for this.
        model
            What was loaded, and is known to nobody any more but to batches that have
            come.
        pending
            Those batches, and the load if it is under way still.
        keep
            Whether to keep it in the host's memory.
        """
        earlier = self.keeping(which)
        parked = None if keep else self._parking.drop(which)
        models = [one for one in (model, parked) if one is not None]
        ended = asyncio.get_running_loop().create_future()
        self._under_way[number] = _Unload(which, keep or bool(earlier), ended)
        self._worker._ongoing_background_tasks.call_soon(
            self._unload, which, number, models, {*pending, *earlier}, keep
        )

    def keeping(self, which: Which) -> set[asyncio.Future[None]]:
        """What is done when it is settled whether a version is kept."""
        under_way = self._under_way.values()
        return {u.ended for u in under_way if u.which == which and u.keeps}

    def numbered(self, numbers: Collection[int]) -> set[asyncio.Future[None]]:
        """What is done when those unloads have ended that have not."""
        return {u.ended for n, u in self._under_way.items() if n in numbers}

    def give_way(self) -> None:
        """The device's thread waits for a model: drop what waits for that thread.

        Else that model might wait for memory, this one for the thread, and the thread
        for that model.
        """
        for move in self._moves:
            try:
                move.model.pop()
            except IndexError:
                continue  # it is on its way already
            move.task.cancel()

    async def _unload(
        self,
        which: Which,
        number: int,
        models: list[ResidentModel],
        pending: set[asyncio.Future[Any]],
        keep: bool,
    ) -> None:
        try:
            if pending:
                await asyncio.wait(pending)
            # Batches hold models.
            pending.clear()
            await self._free(which, models, keep)
        except Exception:
            logger.exception("Unloading %r %r failed", *which, **_about(*which))
        finally:
            self._under_way.pop(number).ended.set_result(None)
        message: protocol.UnloadedMessage = {
            "op": protocol.UNLOADED,
            "name": which[0],
            "version": which[1],
            "unload": number,
        }
        self._worker.batched_send(dict(message))

    async def _free(
        self, which: Which, models: list[ResidentModel], keep: bool
    ) -> None:
        if not keep and (kept := self._parking.drop(which)) is not None:
            models.append(kept)
            del kept
        watched = [(_watch(m.function), m.device.empty_cache) for m in models]
        if keep and models and await self._park(which, models):
            tell_parked(self._worker, which, True)
            return
        models.clear()
        if watched:
            # Not on the device's thread, which may be busy with another for long.
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, _collect, watched)

    async def _park(self, which: Which, model: list[ResidentModel]) -> bool:
        """Keep a model in the host's memory; whether it is there.

        Who takes it from the list decides what becomes of it.
        """
        nbytes, resources = model[0].nbytes, model[0].resources
        if not model[0].can_park or self._device.broken is not None:
            return False
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(None, self._parking.make_room, nbytes):
            return False
        task = asyncio.ensure_future(self._device.run(resources, self._move_off, model))
        move = _Move(model, task)
        self._moves.add(move)
        if self._is_awaited():
            self.give_way()
        try:
            await asyncio.wait([task])
        finally:
            self._moves.discard(move)
        if task.cancelled():
            return False
        error = task.exception()
        if error is not None:
            self._warn(which, error)
            # They hold the model.
            traceback.clear_frames(error.__traceback__)
            return False
        parked = task.result()
        if parked is None or not self._parking.put(which, parked):
            return False
        self._caches.shrink_too(self._parking)
        return True

    def _move_off(self, waiting: list[ResidentModel]) -> ResidentModel | None:
        """Move a model off the device, on whose thread this runs."""
        try:
            model = waiting.pop()
        except IndexError:
            return None  # it has given way
        with self._device.breaking(model.device):
            model.park()
        return model

    def _warn(self, which: Which, error: BaseException) -> None:
        """Say, once, that models are dropped."""
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "%s could not move %r %r into the host's memory: %s. Models that are "
            "dropped like this are read from disk when they are wanted again.",
            self._worker.address,
            *which,
            describe(error),
            **_about(*which),
        )


def _about(name: str, version: str) -> dict[str, Any]:
    stimulus_id = f"daskinfer-unload-{name}-{version}"
    return {"deployment": name, "version": version, "stimulus_id": stimulus_id}


@dataclass(frozen=True, slots=True)
class _Unload:
    """A version that is leaving."""

    which: Which
    keeps: bool
    ended: asyncio.Future[None]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """A model that waits for the device's thread to move it, until that takes it."""

    model: list[ResidentModel]
    task: asyncio.Future[Any]


def tell_parked(worker: Worker, which: Which, parked: bool) -> None:
    """Tell the scheduler that a version is in the host's memory, or has left it."""
    message: protocol.ParkedMessage = {
        "op": protocol.PARKED,
        "name": which[0],
        "version": which[1],
        "parked": parked,
    }
    worker.batched_send(dict(message))


def _collect(watched: list[tuple[Callable[[], bool], Callable[[], None]]]) -> None:
    if any(is_alive() for is_alive, _ in watched):
        # In a cycle with itself, as some modules are. Looking takes a while.
        gc.collect()
    for _, empty_cache in watched:
        empty_cache()


def _watch(function: Any) -> Callable[[], bool]:
    try:
        reference = weakref.ref(function)
    except TypeError:
        return lambda: True
    return lambda: reference() is not None
