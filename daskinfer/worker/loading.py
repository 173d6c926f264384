"""Loading models in the background, so that the worker's event loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic
from distributed.threadpoolexecutor import ThreadPoolExecutor

from daskinfer import config, protocol, transport
from daskinfer.device import RESOURCE_NAMES
from daskinfer.failure import contain, describe, dump_failure
from daskinfer.worker.execution import Call
from daskinfer.worker.inputs import frames
from daskinfer.worker.weights import Weights

if TYPE_CHECKING:
    from distributed import Future, Worker

    from daskinfer.artifact.store import Held
    from daskinfer.device import DeviceReport
    from daskinfer.worker.caching import Caches
    from daskinfer.worker.device_queue import DeviceQueue
    from daskinfer.worker.models import ResidentModel

logger = logging.getLogger("distributed.inference.loading")

#: Seconds that each step of a warm-up waits for a device which is busy.
_PATIENCE = 0.25

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

    Notes
    -----
    Lives on the worker's event loop; models are built in a thread of their own and
    warmed on the device's.
    """

    def __init__(self, worker: Worker, device: DeviceQueue, caches: Caches) -> None:
        self.models: dict[tuple[str, str], ResidentModel] = {}
        self.active: Mapping[str, str] = {}
        self._caches = caches
        self._worker = worker
        self._device = device
        self._weights = Weights(worker)
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._awaited: list[threading.Event] = []
        self._is_closing = False
        self._thread = ThreadPoolExecutor(
            config.integer("loading-threads"), thread_name_prefix="daskinfer-loader"
        )

    def __repr__(self) -> str:
        return f"<Loader models: {len(self.models)} loading: {len(self._loading)}>"

    async def detect(self) -> DeviceReport:
        """Look for devices."""
        return await self._in_thread(_detect)  # type: ignore[no-any-return]

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
        self, future: Future[Any], name: str, version: str | None
    ) -> ResidentModel | None:
        """Wait for a model to be there; None if the future ends first.

        For the device's own thread, which must not wait for the future alone: its
        request may have come here, and wait for that thread.
        """
        changed = threading.Event()
        future.add_done_callback(lambda _: changed.set())
        self._awaited.append(changed)
        try:
            while (found := self.find(name, version)) is None and not future.done():
                changed.wait()
                changed.clear()
        finally:
            self._awaited.remove(changed)
        return found

    def load(self, message: dict[str, Any]) -> None:
        """Begin to load what a :class:`~daskinfer.protocol.LoadMessage` asks for."""
        which = message["name"], message["version"]
        self.activate(message["name"], message["active"])
        if (earlier := self._loading.pop(which, None)) is not None:
            earlier.cancel()
        task = asyncio.create_task(self._load(message), name=f"load-{which}")
        self._loading[which] = task
        self._caches.open(message["name"], message["cache"])
        task.add_done_callback(partial(self._ended, which))

    def forget(
        self, name: str, version: str
    ) -> tuple[ResidentModel | None, list[asyncio.Task[None]]]:
        """Forget a version; return what is left of it.

        Returns
        -------
        ResidentModel or None
            Itself, if it was there.
        list of asyncio.Task
            Its load, called off, which ends when its thread does.
        """
        loading = self._loading.pop((name, version), None)
        if loading is not None:
            loading.cancel()
        model = self.models.pop((name, version), None)
        if not any(key[0] == name for key in (*self.models, *self._loading)):
            self.active = {k: v for k, v in self.active.items() if k != name}
        self._caches.keep_only(key[0] for key in {**self.models, **self._loading})
        return model, [] if loading is None else [loading]

    def close(self) -> None:
        """Let go of everything."""
        self._is_closing = True
        for loading in self._loading.values():
            loading.cancel()
        self._thread.shutdown(wait=False)
        self._weights.close()
        self.models.clear()

    def _ended(self, which: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._loading.get(which) is task:
            del self._loading[which]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Loading %r %r failed", *which, exc_info=error)

    async def _load(self, message: dict[str, Any]) -> None:
        name, version = message["name"], message["version"]
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
            "broken": "",
        }
        try:
            parts = await self._worker.scheduler.daskinfer_artifact(
                name=name, version=version
            )
            if parts is None:
                return  # undeployed meanwhile
            model = await self._make(message, parts["artifact"])
            # Other models here may call it from now on.
            self.models[name, version] = model
            self._tell()
            if parts["warmup"] is not None:
                self._say_warming(message)
                body = frames(parts["warmup"])
                example = await self._in_thread(transport.loads, body)
                report["timings"] = await self._warm(model, example)
            report["digest"] = model.digest
            report["device"] = str(model.device.torch_device)
            report["device_class"] = model.device.device_class
        except Exception as error:
            logger.info("Could not load %r %r", name, version, exc_info=True)
            self.models.pop((name, version), None)
            report["failure"] = dump_failure(error)
            report["digest"] = _digest_of(error)
            # Its frames hold weights, and the report holds it.
            traceback.clear_frames(error.__traceback__)
            if error is self._device.broken:
                report["broken"] = describe(error)
        report["seconds"] = monotonic() - started
        self._worker.batched_send(report)

    def _say_warming(self, message: dict[str, Any]) -> None:
        about = {field: message[field] for field in ("name", "version", "load")}
        self._worker.batched_send({"op": protocol.WARMING, **about})

    def _tell(self) -> None:
        """There is something new for those who wait for a model."""
        for changed in self._awaited:
            changed.set()

    async def _make(
        self, message: dict[str, Any], artifact: dict[str, Any]
    ) -> ResidentModel:
        from daskinfer.artifact.chunks import Chunks

        held = None
        if artifact["chunks"] is not None and artifact["weights"] is None:
            # They do not come with the rest.
            held = await self._weights.get(Chunks.from_message(artifact["chunks"]))
        model = await self._in_thread(self._build, message, artifact, held)
        return model  # type: ignore[no-any-return]

    def _build(
        self, message: dict[str, Any], artifact: dict[str, Any], held: Held | None
    ) -> ResidentModel:
        from daskinfer.artifact import Artifact, DamagedArtifact
        from daskinfer.device import open_device
        from daskinfer.worker.models import ResidentModel

        device = open_device(message["device"])
        needed = message["resources"] or {RESOURCE_NAMES.get(device.kind, ""): 1.0}
        with self._device.breaking(device):
            model = ResidentModel.load(
                message["name"],
                message["version"],
                Artifact.from_message(artifact, None if held is None else held.memory),
                device,
                self._device.account.declared(needed),
                message["policy"],
            )
        if held is not None and not held.is_unchanged():
            raise DamagedArtifact(
                f"the file with the weights of {artifact['label']} was changed while "
                "it was loaded",
                "unknown",
            )
        return model

    async def _warm(
        self, model: ResidentModel, example: Call
    ) -> list[tuple[int, float]]:
        steps: Iterator[Any] = iter(model.warmup(example))
        timings: list[tuple[int, float]] = []
        ended = object()

        def advance() -> Any:
            with self._device.breaking(model.device):
                return next(steps, ended)

        while True:
            # Requests that other models answer meanwhile go first.
            await self._device.idle(_PATIENCE)
            running = self._device.run(model.resources, advance)
            step = await self._until_ended(asyncio.ensure_future(running))
            if step is ended:
                return timings
            if step is not None:
                timings.append(step)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await self._until_ended(
            loop.run_in_executor(self._thread, contain, function, *args)
        )

    async def _until_ended(self, running: asyncio.Future[Any]) -> Any:
        """Wait for a thread, even if the load is called off meanwhile."""
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # It cannot be interrupted, and what it takes is not free before it ends.
            if not self._is_closing:
                await asyncio.gather(running, return_exceptions=True)
            raise


def _digest_of(error: Exception) -> str:
    """What has arrived instead of what was asked for, if that is the error."""
    from daskinfer.artifact import DamagedArtifact

    return error.digest if isinstance(error, DamagedArtifact) else ""


def _detect() -> DeviceReport:
    from daskinfer.device import detect

    # Never fails: a worker without torch says so, and loading a model will too.
    return detect()
