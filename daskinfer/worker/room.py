"""How much of a worker's memory models may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from daskinfer import config
from daskinfer.device import RESOURCE_NAMES, has_own_memory, open_device
from daskinfer.exceptions import ModelTooLarge
from daskinfer.logs import Log
from daskinfer.weights import too_large

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.device import Device, DeviceReport

logger = Log("room")


class Room:
    """The bytes that models may take on one worker, as its configuration says.

    Parameters
    ----------
    worker
        Whose memory it is.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._device = config.share_or_bytes("weights.device")
        self._host = config.share_or_bytes("weights.host")

    def __repr__(self) -> str:
        return f"<Room device: {self._device} host: {self._host}>"

    @property
    def host(self) -> int | None:
        """Bytes of the host's memory; None: any number."""
        limit = self._worker.memory_manager.memory_limit
        if isinstance(self._host, float):
            return None if not limit else int(self._host * limit)
        return self._host

    def on(self, device: Device) -> int | None:
        """Bytes of a device's memory; None: any number. From any thread."""
        if not device.has_own_memory:
            return self.host
        if isinstance(self._device, float):
            return int(self._device * device.memory()[1])
        return self._device

    def by_kind(
        self, report: DeviceReport, declared: Mapping[str, float]
    ) -> dict[str, int]:
        """Bytes by kind of device, as far as that is limited, and known.

        Parameters
        ----------
        report
            Which devices there are.
        declared
            The worker's resources. Where the size of a device matters, only one that
            the worker has declared is opened.
        """
        found: dict[str, int] = {}
        for backend in report.backends:
            if not backend.count:
                continue
            room = self._of_kind(backend.kind, declared)
            if room is not None:
                found[backend.kind] = room
        return found

    def _of_kind(self, kind: str, declared: Mapping[str, float]) -> int | None:
        if not has_own_memory(kind):
            return self.host
        if not isinstance(self._device, float):
            return self._device
        if RESOURCE_NAMES[kind] not in declared:
            return None
        try:
            return self.on(open_device(kind))
        except Exception:
            # Loading a model will meet it as well, and say it to who asked for that.
            logger.warning("The memory of the %s is not known", kind, exc_info=True)
            return None

    def refusal(
        self, name: str, version: str, nbytes: int, device: Device
    ) -> ModelTooLarge | None:
        """What to raise about a model of so many bytes; None if it may be there."""
        room = self.on(device)
        if room is None or nbytes <= room:
            return None
        about = name, version, nbytes, room, device.kind, self._worker.address
        if not device.has_own_memory:
            return ModelTooLarge(too_large(*about))
        return ModelTooLarge(too_large(*about, memory=str(device.torch_device)))
