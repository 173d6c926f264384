"""What the accelerators of a worker are doing, among Dask's own worker metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from distributed.utils import offload

from daskinfer.logs import Log

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.device import Device, DeviceReport
    from daskinfer.worker.models import ResidentModel

logger = Log("telemetry")

#: By kind of device, its name among the metrics. Dask has one for GPUs.
METRICS = {"npu": "npu", "cuda": "gpu"}

Models: TypeAlias = "Mapping[tuple[str, str], ResidentModel]"


class Telemetry:
    """Has a worker's heartbeats tell of its accelerators, as those for GPUs do.

    ``worker.metrics["npu"]`` (or ``"gpu"``) becomes a mapping: ``device``, ``name``,
    ``memory-used`` and ``memory-total`` in bytes, and ``utilization`` in percent, or
    None where the driver does not tell. ``npu_memory`` and ``npu_utilization`` are two
    of these as plain numbers, which Dask's table of workers shows.

    No device is opened for that: as long as no model was loaded on it, all is None.
    Where Dask measures GPUs by itself, its ``"gpu"`` and ``gpu_utilization`` are left
    as they are, and ``gpu_memory`` stands beside them.

    Parameters
    ----------
    worker
        Whose they are.
    models
        What is loaded; tells which devices are open.

    Notes
    -----
    Lives on the worker's event loop. Devices are asked in a thread, at each heartbeat.

    Attributes
    ----------
    latest
        What was told last, by kind.
    """

    def __init__(self, worker: Worker, models: Models) -> None:
        self.latest: dict[str, dict[str, Any]] = {}
        self._worker = worker
        self._models = models
        self._devices: dict[str, Device] = {}
        self._failed: set[str] = set()

    def __repr__(self) -> str:
        return f"<Telemetry of {sorted(self._devices)}>"

    def found(self, report: DeviceReport) -> None:
        """Begin to tell of the kinds of devices that are there."""
        metrics = self._worker.metrics
        for backend in report.backends:
            kind, name = backend.kind, METRICS.get(backend.kind)
            if not backend.count or name is None or f"{name}_memory" in metrics:
                continue
            memory: partial[Any] = partial(self._figure, kind, "memory-used")
            if name in metrics:
                # Dask has the utilization as a plain number, too.
                memory = partial(self._measured_figure, kind, "memory-used")
            else:
                metrics[name] = partial(self._measure, kind)
                metrics[f"{name}_utilization"] = partial(
                    self._figure, kind, "utilization"
                )
            metrics[f"{name}_memory"] = memory

    def close(self) -> None:
        """Tell nothing more."""
        self.latest.clear()
        for name in METRICS.values():
            for key in (name, f"{name}_memory", f"{name}_utilization"):
                metric = self._worker.metrics.get(key)
                if isinstance(metric, partial) and (
                    getattr(metric.func, "__self__", None) is self
                ):
                    del self._worker.metrics[key]

    def devices(self) -> list[dict[str, Any]]:
        """What was told last of each device that is open."""
        return [told for told in self.latest.values() if told["device"] is not None]

    async def _measure(self, kind: str, worker: Worker) -> dict[str, Any]:
        for model in self._models.values():
            if model.device.kind == kind:
                self._devices[kind] = model.device
        device = self._devices.get(kind)
        told = dict.fromkeys(
            ("device", "name", "memory-used", "memory-total", "utilization")
        )
        if device is not None:
            try:
                told = await offload(measure, device)
                self._failed.discard(kind)
            except Exception as error:
                # With each heartbeat, for as long as the device is broken.
                if kind not in self._failed:
                    logger.warning("%r does not tell how it does: %s", device, error)
                self._failed.add(kind)
        self.latest[kind] = told
        return told

    async def _measured_figure(self, kind: str, field: str, worker: Worker) -> Any:
        return (await self._measure(kind, worker))[field]

    def _figure(self, kind: str, field: str, worker: Worker) -> Any:
        return self.latest.get(kind, {}).get(field)


def measure(device: Device) -> dict[str, Any]:
    """What a device is doing.

    Examples
    --------
    >>> from daskinfer.device import open_device
    >>> told = measure(open_device("cpu"))
    >>> told["device"], 0 < told["memory-used"] < told["memory-total"]
    ('cpu', True)
    """
    free, total = device.memory()
    utilization = device.utilization()
    return {
        "device": str(device.torch_device),
        "name": device.name,
        "memory-used": total - free,
        "memory-total": total,
        "utilization": None if utilization is None else 100 * utilization,
    }
