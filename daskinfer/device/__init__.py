"""Devices: find them, open them, tell a worker process which one is its own.

Back-ends are ``npu``, ``cuda`` and ``cpu``.  Nothing here imports torch before
`detect` or `open_device` is called; `host_devices` asks another process.
"""

from __future__ import annotations

from daskinfer.device.base import (
    BackendReport,
    Device,
    DeviceNotFound,
    DeviceReport,
)
from daskinfer.device.cpu import CpuDevice
from daskinfer.device.cuda import CudaDevice
from daskinfer.device.host import (
    RESOURCE_NAMES,
    HostDevice,
    host_devices,
    host_report,
    worker_environment,
)
from daskinfer.device.loading import load_torch
from daskinfer.device.npu import NpuDevice
from daskinfer.device.registry import (
    detect,
    has_own_memory,
    open_device,
    parse_device,
)

__all__ = [
    "RESOURCE_NAMES",
    "BackendReport",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceNotFound",
    "DeviceReport",
    "HostDevice",
    "NpuDevice",
    "detect",
    "has_own_memory",
    "host_devices",
    "host_report",
    "load_torch",
    "open_device",
    "parse_device",
    "worker_environment",
]
