"""What npu and cuda have in common: one layer over ``torch.accelerator``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from daskinfer.device.base import Device, text_of
from daskinfer.device.loading import load_torch

if TYPE_CHECKING:
    import torch


class AcceleratorDevice(Device):
    """One accelerator that torch knows; a back-end adds what is its vendor's own.

    Parameters
    ----------
    index : int
        Index among the devices visible to this process.

    Attributes
    ----------
    visibility_variable : str
        The environment variable that limits a process to some devices.
    """

    visibility_variable: ClassVar[str]

    def __init__(self, index: int = 0) -> None:
        torch = load_torch()
        self.torch_device = torch.device(self.kind, index)
        self._index = index
        self._accelerator = torch.accelerator
        self._vendor: Any = torch.get_device_module(self.torch_device)
        self.name = str(self._vendor.get_device_name(index))
        self.device_class = f"{self.kind}/{self._class_name()}"

    def _class_name(self) -> str:
        return self.name.replace(" ", "-")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the calling thread's current device within the block."""
        with self._accelerator.device_index(self._index):
            yield

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give `tensor` on the device; a pinned one is copied asynchronously."""
        if tensor.device.type != "cpu":
            return tensor.to(self.torch_device)
        return tensor.to(self.torch_device, non_blocking=tensor.is_pinned())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give `tensor` on the CPU; blocks, because a non-blocking copy is unsafe."""
        return tensor.detach().cpu()

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done; raises its errors."""
        self._accelerator.synchronize(self.torch_device)

    def memory(self) -> tuple[int, int]:
        """Give ``(free, total)`` bytes; what torch keeps for reuse is not free."""
        free, total = self._vendor.mem_get_info(self._index)
        return int(free), int(total)

    def allocated(self) -> int:
        """Bytes in this process's tensors on the device."""
        return int(self._accelerator.memory_allocated(self.torch_device))

    def room(self) -> int:
        """Bytes that are free, or kept by torch for reuse."""
        reserved = int(self._vendor.memory_reserved(self._index))
        return self.memory()[0] + max(reserved - self.allocated(), 0)

    def reset_peak(self) -> None:
        """Begin to watch what this process's tensors take."""
        self._vendor.reset_peak_memory_stats(self._index)

    def peak(self) -> int:
        """The most bytes in this process's tensors since `reset_peak`."""
        return int(self._vendor.max_memory_allocated(self._index))

    def empty_cache(self) -> None:
        """Return memory that torch keeps for reuse to the device."""
        with self.active():
            self._accelerator.empty_cache()

    def is_out_of_memory(self, exc: BaseException) -> bool:
        """Recognize torch's error class, and older plug-ins by their text."""
        torch = load_torch()
        return isinstance(exc, torch.OutOfMemoryError | MemoryError) or (
            isinstance(exc, RuntimeError) and "out of memory" in text_of(exc).lower()
        )
