"""Making models of what has arrived, away from the worker's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from distributed.threadpoolexecutor import ThreadPoolExecutor

from daskinfer import config, protocol
from daskinfer.artifact.building import MODULE
from daskinfer.device import RESOURCE_NAMES
from daskinfer.worker.execution import Call
from daskinfer.worker.threads import run_on
from daskinfer.worker.weights import Weights

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.artifact.store import Held
    from daskinfer.device import Device, DeviceReport
    from daskinfer.worker.device_queue import DeviceQueue
    from daskinfer.worker.models import ResidentModel
    from daskinfer.worker.room import Room

#: Seconds that each step of a warm-up waits for a device which is busy.
_PATIENCE = 0.25


class Builder:
    """Builds models and runs them in.

    Parameters
    ----------
    worker
        Whose models they are.
    device
        Where they are warmed.
    room
        What they may take.

    Attributes
    ----------
    weights
        Where those come from that are not in the message.
    pressed
        Set while the device's thread waits for a model: then none waits for room.

    Notes
    -----
    Lives on the worker's event loop; models are built in a thread of their own and
    warmed on the device's.
    """

    def __init__(self, worker: Worker, device: DeviceQueue, room: Room) -> None:
        self.weights = Weights(worker)
        self.pressed = asyncio.Event()
        self._worker = worker
        self._device = device
        self._room = room
        self._is_closing = False
        self._thread = ThreadPoolExecutor(
            config.integer("loading-threads"), thread_name_prefix="daskinfer-loader"
        )

    def __repr__(self) -> str:
        return f"<Builder for {self._device!r}>"

    def close(self) -> None:
        """Wait for nothing that runs in a thread."""
        self._is_closing = True
        self._thread.shutdown(wait=False)
        self.weights.close()

    async def detect(self) -> tuple[DeviceReport, dict[str, int]]:
        """Look for devices, and how much models may take of them."""
        return await self.in_thread(self._detect)  # type: ignore[no-any-return]

    async def make(
        self,
        message: dict[str, Any],
        artifact: dict[str, Any],
        after: Collection[asyncio.Future[Any]],
    ) -> tuple[ResidentModel, str]:
        """Fetch what is missing, and build a model.

        Parameters
        ----------
        message
            A :class:`~daskinfer.protocol.LoadMessage`.
        artifact
            As the scheduler sends it.
        after
            What must have ended before there is memory for it.

        Returns
        -------
        ResidentModel
            It takes calls.
        str
            The source, as in :class:`~daskinfer.protocol.LoadedMessage`.
        """
        from daskinfer.artifact.chunks import Chunks

        held = None
        if artifact["chunks"] is not None and artifact["weights"] is None:
            # They do not come with the rest.
            held = await self.weights.get(Chunks.from_message(artifact["chunks"]))
        await self._wait_for(after)
        model = await self.in_thread(self._build, message, artifact, held)
        return model, protocol.DISK if held is not None and held.was_there else ""

    async def resume(
        self,
        message: dict[str, Any],
        model: ResidentModel,
        after: Collection[asyncio.Future[Any]],
    ) -> None:
        """Move a model back onto its device.

        Parameters
        ----------
        message, after
            As for :meth:`make`.
        model
            It was parked.
        """
        await self._wait_for(after)
        model.resources = self._resources(message, model.device)
        # Not on the device's thread, where another model may be waiting for this one.
        await self.in_thread(self._resume, model)

    async def warm(
        self, model: ResidentModel, example: Call, *, brief: bool
    ) -> list[tuple[int, float]]:
        """Run a model at the sizes that it may meet; return rows and seconds."""
        steps: Iterator[Any] = iter(model.warmup(example, brief=brief))
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

    async def _wait_for(self, after: Collection[asyncio.Future[Any]]) -> None:
        """Wait for memory, unless what has it waits for what is to be loaded."""
        if not after:
            return
        pressed = asyncio.ensure_future(self.pressed.wait())
        freed = asyncio.ensure_future(asyncio.wait(after))
        try:
            await asyncio.wait({pressed, freed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pressed.cancel()
            freed.cancel()

    async def in_thread(self, function: Any, *args: Any) -> Any:
        """Run a function in the thread of what is loaded."""
        return await self._until_ended(run_on(self._thread, function, *args))

    async def _until_ended(self, running: asyncio.Future[Any]) -> Any:
        """Wait for a thread, even if the load is called off meanwhile."""
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # It cannot be interrupted, and what it takes is not free before it ends.
            if not self._is_closing:
                await asyncio.gather(running, return_exceptions=True)
            raise

    def _resources(self, message: dict[str, Any], device: Device) -> dict[str, float]:
        needed = message["resources"] or {RESOURCE_NAMES.get(device.kind, ""): 1.0}
        return self._device.account.declared(needed)

    # In the thread

    def _detect(self) -> tuple[DeviceReport, dict[str, int]]:
        from daskinfer.device import detect

        # Never fails: a worker without torch says so, and loading a model will too.
        report = detect()
        return report, self._room.by_kind(report, self._worker.state.total_resources)

    def _build(
        self, message: dict[str, Any], artifact: dict[str, Any], held: Held | None
    ) -> ResidentModel:
        from daskinfer.artifact import Artifact, DamagedArtifact
        from daskinfer.device import open_device
        from daskinfer.worker.models import ResidentModel

        which = message["name"], message["version"]
        device = open_device(message["device"])
        with self._device.breaking(device):
            refusal = None
            if artifact["format"] == MODULE:
                refusal = self._room.refusal(*which, artifact["nbytes"], device)
            if refusal is not None:
                raise refusal
            model = ResidentModel.load(
                *which,
                Artifact.from_message(artifact, None if held is None else held.memory),
                device,
                self._resources(message, device),
                message["policy"],
            )
            refusal = self._room.refusal(*which, model.nbytes, device)
            if refusal is not None:
                del model
                device.empty_cache()
                raise refusal
        if held is not None and not held.is_unchanged():
            raise DamagedArtifact(
                f"the file with the weights of {artifact['label']} was changed while "
                "it was loaded",
                "unknown",
            )
        return model

    def _resume(self, model: ResidentModel) -> None:
        with self._device.breaking(model.device):
            model.resume()
