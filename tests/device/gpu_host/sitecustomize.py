"""Answers for the driver of two NVIDIA GPUs, in every process with this on its path.

What is replaced is what would call libcuda or libnvidia-ml, and nothing else: torch,
pynvml and Dask work with the answers. No tensor can be on such a device. What
``WITHOUT_NVML`` is set for finds no management library.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pynvml
import torch

COUNT = 2
NAME = "NVIDIA H200"
GIB = 1 << 30
TOTAL = 141 * GIB
#: By index among all of the host; Dask and torch ask the one that is visible.
USED = (10 * GIB, 30 * GIB)
UTILIZATION = (10, 60)


def visible() -> list[int]:
    """The host's GPUs that this process may use."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return list(range(COUNT))
    return [int(index) for index in told.split(",") if index]


def free_and_total(index: int) -> tuple[int, int]:
    return TOTAL - USED[visible()[index]], TOTAL


torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: bool(visible())
torch.cuda.device_count = lambda: len(visible())
torch.cuda.get_device_name = lambda index: NAME
torch.cuda.mem_get_info = free_and_total
torch.cuda.memory_reserved = lambda index: 0
torch.cuda.max_memory_allocated = lambda index: 0
torch.cuda.reset_peak_memory_stats = lambda index: None
torch.accelerator.memory_allocated = lambda device: 0
torch.accelerator.synchronize = lambda device: None
torch.accelerator.empty_cache = lambda: None
torch.accelerator.device_index = contextlib.nullcontext

if "WITHOUT_NVML" not in os.environ:
    pynvml.nvmlInit = lambda: None
    pynvml.nvmlDeviceGetCount = lambda: COUNT
    pynvml.nvmlDeviceGetHandleByIndex = int
    pynvml.nvmlDeviceGetName = lambda handle: NAME
    pynvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(
        used=USED[handle], total=TOTAL
    )
    pynvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(
        gpu=UTILIZATION[handle]
    )
    pynvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: []
    pynvml.nvmlDeviceGetComputeRunningProcesses_v2 = lambda handle: []
