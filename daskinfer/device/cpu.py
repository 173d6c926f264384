"""The CPU as a device."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, ClassVar

import psutil
from distributed.system import MEMORY_LIMIT

from daskinfer import config
from daskinfer.device.allocator import keep_memory, return_memory
from daskinfer.device.base import BackendReport, Device, text_of
from daskinfer.device.loading import load_torch

if TYPE_CHECKING:
    import torch


class CpuDevice(Device):
    """The cores of this process; there is one such device.

    Parameters
    ----------
    index : int
        Always 0.

    Examples
    --------
    >>> CpuDevice().torch_device
    device(type='cpu')
    """

    kind: ClassVar[str] = "cpu"
    has_own_memory: ClassVar[bool] = False

    def __init__(self, index: int = 0) -> None:
        torch = load_torch()
        self.torch_device = torch.device("cpu")
        self.name = platform.machine() or "cpu"
        self.device_class = f"cpu/{torch.get_num_threads()}-threads"
        kept = config.nbytes("cpu.keep-memory")
        if kept:
            keep_memory(kept)

    @staticmethod
    def report() -> BackendReport:
        """There is always one."""
        threads = load_torch().get_num_threads()
        return BackendReport("cpu", 1, f"{threads} threads per operation")

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give `tensor` on the CPU."""
        return tensor.to(self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give `tensor` detached; it shares its memory."""
        return tensor.detach().cpu()

    def synchronize(self) -> None:
        """Return at once: operations on the CPU are done when they return."""

    def memory(self) -> tuple[int, int]:
        """Give ``(free, total)`` bytes, a container's limit respected."""
        free_in_container = max(MEMORY_LIMIT - self.allocated(), 0)
        return min(psutil.virtual_memory().available, free_in_container), MEMORY_LIMIT

    def allocated(self) -> int:
        """Resident bytes of this process: torch does not count tensors on the CPU."""
        return int(psutil.Process().memory_info().rss)

    def utilization(self) -> float | None:
        """Busy share of the host's cores since the call before; the first says 0."""
        return float(psutil.cpu_percent(interval=None)) / 100

    def empty_cache(self) -> None:
        """Return what the C library keeps; torch keeps nothing on the CPU."""
        return_memory()

    def is_out_of_memory(self, exc: BaseException) -> bool:
        """Recognize `MemoryError` and the error of torch's allocator."""
        return isinstance(exc, MemoryError) or (
            isinstance(exc, RuntimeError) and "can't allocate memory" in text_of(exc)
        )

    def is_fatal(self, exc: BaseException) -> bool:
        """Never: an error on the CPU leaves no trace."""
        return False
