"""What the simulated plug-in publishes as ``torch.npu``: the real one's functions.

Signatures and errors are those of torch_npu 2.13, as far as a serving process calls
them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from torch_npu import simulator

NAME = "Ascend910B1"

_initialized_in: int | None = None
_jit_compile = True


# --- devices -------------------------------------------------------------------------


def is_available() -> bool:
    return simulator.device_count() > 0


def device_count() -> int:
    return simulator.device_count()


def init() -> None:
    global _initialized_in
    if _is_in_bad_fork():
        raise RuntimeError(
            "Cannot re-initialize NPU in forked subprocess. To use NPU with "
            "multiprocessing, you must use the 'spawn' start method"
        )
    _initialized_in = os.getpid()


_lazy_init = init


def is_initialized() -> bool:
    return _initialized_in == os.getpid()


def _is_in_bad_fork() -> bool:
    return _initialized_in not in (None, os.getpid())


def current_device() -> int:
    init()
    return simulator.current_device()


def set_device(device: Any) -> None:
    init()
    simulator.set_device(_get_device_index(device))


class device(contextlib.ContextDecorator):
    def __init__(self, device: Any) -> None:
        self.index = _get_device_index(device)

    def __enter__(self) -> device:
        self.before = simulator.current_device()
        simulator.set_device(self.index)
        return self

    def __exit__(self, *exc_info: object) -> None:
        simulator.set_device(self.before)


def synchronize(device: Any = None) -> None:
    init()
    torch.accelerator.synchronize(_checked_index(device))


def get_device_name(device: Any = None) -> str:
    _checked_index(device)
    return NAME


def utilization(device: Any = None) -> int:
    init()
    _checked_index(device)
    return 0


def set_compile_mode(jit_compile: bool) -> None:
    global _jit_compile
    _jit_compile = jit_compile


def is_jit_compile_false() -> bool:
    return not _jit_compile


def _get_device_index(device: Any = None, optional: bool = False) -> int:
    if device is None:
        return simulator.current_device()
    if isinstance(device, int):
        return device if device >= 0 else simulator.current_device()
    wanted = torch.device(device)
    if wanted.type != "npu":
        raise ValueError(f"Expected a npu device, but got: {wanted}")
    return simulator.current_device() if wanted.index is None else wanted.index


def _checked_index(device: Any = None) -> int:
    index = _get_device_index(device)
    if not 0 <= index < simulator.device_count():
        raise AssertionError("Invalid device id")
    return index


# --- memory --------------------------------------------------------------------------


def mem_get_info(device: Any = None) -> tuple[int, int]:
    init()
    return torch.accelerator.get_memory_info(_checked_index(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    return torch.accelerator.memory_stats(_get_device_index(device))


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: Any = None) -> int:
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_get_device_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


# --- streams and events --------------------------------------------------------------


class Stream:
    # torch.Event and torch.accelerator take torch.Stream itself only.
    def __new__(cls, device: Any = None, priority: int = 0) -> torch.Stream:
        index = _get_device_index(device)
        return torch.Stream(torch.device("npu", index), priority=priority)


class Event:
    def __new__(cls, enable_timing: bool = False, **options: Any) -> torch.Event:
        return torch.Event(torch.device("npu"), enable_timing=enable_timing)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_get_device_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    if stream is None:
        yield None
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield stream
    finally:
        torch.accelerator.set_stream(before)


# --- numbers -------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported() -> bool:
    return True


def manual_seed(seed: int) -> None:
    """Do nothing: random numbers come from the CPU's generator, seeded by torch."""


manual_seed_all = manual_seed


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = "npu") -> None:
    torch.set_rng_state(state)
