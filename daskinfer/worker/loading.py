"""Loading models in the background, so that the worker's event loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic

from daskinfer import protocol, transport
from daskinfer.failure import describe, dump_failure
from daskinfer.logs import Log
from daskinfer.worker.building import Builder
from daskinfer.worker.inputs import frames
from daskinfer.worker.parking import Parking
from daskinfer.worker.room import Room
from daskinfer.worker.unloading import Unloader, tell_parked

if TYPE_CHECKING:
    from distributed import Future, Worker

    from daskinfer.device import DeviceReport
    from daskinfer.reading import Inbox
    from daskinfer.worker.caching import Caches
    from daskinfer.worker.device_queue import DeviceQueue
    from daskinfer.worker.models import ResidentModel
    from daskinfer.worker.parking import Which

logger = Log("loading")

_here = threading.local()


class Loader:
    """Loads, warms and forgets the models of one worker.

    Parameters
    ----------
    worker
        Whose models they are.
    device
        Where they are warmed.
    caches
        Opened with them.

    Attributes
    ----------
    models
        What is there, by name and version; some are being warmed.
    active
        The version that answers, by name. Never changed, but replaced.
    parking
        What was loaded, and may be wanted again.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(self, worker: Worker, device: DeviceQueue, caches: Caches) -> None:
        self.models: dict[tuple[str, str], ResidentModel] = {}
        self.active: Mapping[str, str] = {}
        self._worker = worker
        self._device = device
        self._caches = caches
        self._loading: dict[Which, asyncio.Task[None]] = {}
        self._resuming: set[Which] = set()
        self._cold: set[Which] = set()
        self._awaited: list[threading.Event] = []
        self._room = Room(worker)
        self._builder = Builder(worker, device, self._room)
        self.parking = Parking(self._room_to_park, self._evicted)
        self._unloader = Unloader(
            worker, device, self.parking, caches, lambda: bool(self._awaited)
        )

    def __repr__(self) -> str:
        return (
            f"<Loader models: {len(self.models)} loading: {len(self._loading)} "
            f"parked: {len(self.parking)}>"
        )

    async def detect(self) -> tuple[DeviceReport, dict[str, int]]:
        """Look for devices, and how many bytes models may take of them."""
        return await self._builder.detect()

    def find(self, name: str, version: str | None) -> ResidentModel | None:
        """A loaded model.

        Without a version, the one that was active when the batch was sent that the
        calling thread runs; or else the one that is active.
        """
        if version is not None:
            return self.models.get((name, version))
        for active in (getattr(_here, "active", self.active), self.active):
            found = self.models.get((name, active.get(name, "")))
            if found is not None:
                return found
        return None

    @contextlib.contextmanager
    def as_of(self, active: Mapping[str, str]) -> Iterator[None]:
        """Let the calling thread find what was active at some time."""
        _here.active = active
        try:
            yield
        finally:
            del _here.active

    def activate(self, name: str, version: str) -> None:
        """Note which version answers from now on."""
        self.active = {**self.active, name: version}
        self._tell()

    def find_before(
        self, future: Future[Any] | Inbox, name: str, version: str | None
    ) -> ResidentModel | None:
        """Wait for a model to be there; None if the future is done first.

        For the device's own thread, which must not wait for the future alone: its
        request may have come here, and wait for that thread.
        """
        changed = threading.Event()
        future.add_done_callback(lambda _: changed.set())
        self._awaited.append(changed)
        self._worker.loop.add_callback(self._press)
        try:
            while (found := self.find(name, version)) is None and not future.done():
                changed.wait()
                changed.clear()
        finally:
            self._awaited.remove(changed)
            self._worker.loop.add_callback(self._press)
        return found

    def _press(self) -> None:
        """The device's thread waits for a model, or not any more.

        Meanwhile nothing leaves that has batches, as one of them has the thread: what
        is loaded must fit beside it.
        """
        if self._awaited:
            self._unloader.give_way()
            self._builder.pressed.set()
        else:
            self._builder.pressed.clear()

    def load(self, message: dict[str, Any]) -> None:
        """Begin to load what a :class:`~daskinfer.protocol.LoadMessage` asks for."""
        which = message["name"], message["version"]
        self.activate(message["name"], message["active"])
        self._cold.discard(which)
        if (earlier := self._loading.pop(which, None)) is not None:
            earlier.cancel()
        leaving = self._unloader.keeping(which)
        # At once, before others that leave the device take its place.
        parked = None if leaving else self._take_parked(which, message)
        load = self._load(which, message, leaving, parked)
        task = asyncio.create_task(load, name=f"load-{which}")
        self._loading[which] = task
        self._caches.open(message["name"], message["cache"])
        task.add_done_callback(partial(self._ended, which))

    def unload(
        self,
        which: Which,
        number: int,
        keep: bool,
        jobs: Iterable[asyncio.Future[Any]],
    ) -> None:
        """Forget a version, and say so once its memory is free.

        Parameters
        ----------
        which, number, keep
            As an :class:`~daskinfer.protocol.UnloadMessage` says.
        jobs
            Its batches that have come, and are not answered.
        """
        name = which[0]
        pending = set(jobs)
        if (loading := self._loading.pop(which, None)) is not None:
            loading.cancel()
            pending.add(loading)
        model = self.models.pop(which, None)
        if not any(key[0] == name for key in (*self.models, *self._loading)):
            self.active = {k: v for k, v in self.active.items() if k != name}
        # The results of what may be wanted again are, too.
        (self._cold.add if keep else self._cold.discard)(which)
        known = (*self.models, *self._loading, *self._cold)
        self._caches.keep_only({key[0] for key in known})
        # What is not run in yet would not be later either.
        keep = keep and loading is None
        self._unloader.begin(which, number, model, pending, keep)

    def close(self) -> None:
        """Let go of everything."""
        for loading in self._loading.values():
            loading.cancel()
        self._builder.close()
        self.models.clear()
        self.parking.clear()

    def _ended(self, which: Which, task: asyncio.Task[None]) -> None:
        if self._loading.get(which) is task:
            del self._loading[which]
        if which in self._resuming:
            # It is on the host no more, nor on the device.
            self._resuming.discard(which)
            self._say_evicted(which)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(
                "Loading %r %r failed", *which, exc_info=error, **_about(*which)
            )

    async def _load(
        self,
        which: Which,
        message: dict[str, Any],
        leaving: set[asyncio.Future[None]],
        parked: ResidentModel | None,
    ) -> None:
        name, version = which
        started = monotonic()
        report: dict[str, Any] = {
            "op": protocol.LOADED,
            "name": name,
            "version": version,
            "load": message["load"],
            "digest": "",
            "failure": None,
            "device": "",
            "device_class": "",
            "timings": [],
            "nbytes": 0,
            "source": "",
            "kind": protocol.PLAIN,
            "broken": "",
        }
        try:
            told = await self._attempt(which, message, leaving, parked)
            if told is None:
                return
            report |= told
        except Exception as error:
            logger.info("Could not load %r %r", *which, exc_info=True, **_about(*which))
            self.models.pop(which, None)
            parked = None
            report["failure"] = dump_failure(error)
            report["digest"] = _digest_of(error)
            # Its frames hold weights, and the report holds it.
            traceback.clear_frames(error.__traceback__)
            if error is self._device.broken:
                report["broken"] = describe(error)
        report["seconds"] = monotonic() - started
        self._worker.batched_send(report)

    async def _attempt(
        self,
        which: Which,
        message: dict[str, Any],
        leaving: set[asyncio.Future[None]],
        parked: ResidentModel | None,
    ) -> dict[str, Any] | None:
        """Load, and return what there is to tell; None if it is not wanted any more."""
        if leaving:
            await asyncio.wait(leaving)
            parked = self._take_parked(which, message)
        after = self._unloader.numbered(message["after"])
        warmup, timings = None, list[tuple[int, float]]()
        if parked is not None:
            model, source = parked, protocol.HOST
            await self._builder.resume(message, model, after)
        else:
            parts = await self._worker.scheduler.daskinfer_artifact(
                name=which[0], version=which[1]
            )
            if parts is None:
                return None  # undeployed meanwhile
            warmup = parts["warmup"]
            model, source = await self._builder.make(message, parts["artifact"], after)
        self._resuming.discard(which)
        # Other models here may call it from now on.
        self.models[which] = model
        self._tell()
        if model.is_on_cpu and len(self.parking):
            await self._builder.in_thread(self.parking.fit)
        if warmup is not None:
            self._say_warming(message)
            example = await self._builder.in_thread(transport.loads, frames(warmup))
            brief = message["again"]
            timings = await self._builder.warm(model, example, brief=brief)
        return {
            "digest": model.digest,
            "device": str(model.device.torch_device),
            "device_class": model.device.device_class,
            "timings": timings,
            "nbytes": model.nbytes,
            "source": source,
            "kind": model.kind,
        }

    def _say_warming(self, message: dict[str, Any]) -> None:
        about = {field: message[field] for field in ("name", "version", "load")}
        self._worker.batched_send({"op": protocol.WARMING, **about})

    def _tell(self) -> None:
        """There is something new for those who wait for a model."""
        for changed in self._awaited:
            changed.set()

    # The host's memory

    def _take_parked(
        self, which: Which, message: dict[str, Any]
    ) -> ResidentModel | None:
        parked = self.parking.take(which, message["digest"])
        if parked is not None:
            self._resuming.add(which)
        return parked

    def _room_to_park(self) -> float:
        """Bytes of the host's memory that models on the CPU leave. From any thread."""
        room = self._room.host
        if room is None:
            return math.inf
        on_cpu = (m.nbytes for m in list(self.models.values()) if m.is_on_cpu)
        return room - sum(on_cpu)

    def _evicted(self, which: Which) -> None:
        # From any thread.
        self._worker.loop.add_callback(self._say_evicted, which)

    def _say_evicted(self, which: Which) -> None:
        tell_parked(self._worker, which, False)


def _about(name: str, version: str) -> dict[str, Any]:
    stimulus_id = f"daskinfer-load-{name}-{version}"
    return {"deployment": name, "version": version, "stimulus_id": stimulus_id}


def _digest_of(error: Exception) -> str:
    """What has arrived instead of what was asked for, if that is the error."""
    from daskinfer.artifact import DamagedArtifact

    return error.digest if isinstance(error, DamagedArtifact) else ""
