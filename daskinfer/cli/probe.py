"""What `dask infer doctor` asks of every process of a cluster.

The functions here travel by value and import what they need when they run: they also
work where daskinfer is missing, or is there in another version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

PACKAGES = (
    "daskinfer",
    "dask",
    "distributed",
    "torch",
    "torch_npu",
    "numpy",
    "cloudpickle",
    "msgpack",
)

SETTINGS = (
    "distributed.comm.compression",
    "distributed.scheduler.worker-ttl",
    "distributed.scheduler.validate",
    "distributed.worker.multiprocessing-method",
    "distributed.worker.validate",
)


async def examine(look_for_devices: bool) -> dict[str, Any]:
    """Tell about this process, as plain data.

    Parameters
    ----------
    look_for_devices
        Whether to import torch and ask it for devices, which takes seconds the first
        time; none is opened.
    """
    import asyncio
    import os
    import platform
    import socket

    import dask
    from dask.system import CPU_COUNT

    thread_variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    visibility_variables = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    found = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "packages": {name: _version_of(name) for name in PACKAGES},
        "cores": CPU_COUNT,
        "threads": {name: os.environ.get(name) for name in thread_variables},
        "visible": {name: os.environ.get(name) for name in visibility_variables},
        "settings": {name: dask.config.get(name, None) for name in SETTINGS},
        "cann": _cann(),
        "devices": None,
        "torch_threads": None,
    }
    if look_for_devices:
        found |= await asyncio.get_running_loop().run_in_executor(None, _devices)
    return found


def _version_of(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cann() -> dict[str, str | None] | None:
    """Where CANN is said to be, and its version; None where its setup was not run."""
    import os
    from pathlib import Path

    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    if not home:
        return None
    # Named by CANN's installation guide as the place to look.
    for file in Path(home).glob("*/ascend_toolkit_install.info"):
        for line in file.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("version="):
                return {"home": home, "version": line.removeprefix("version=").strip()}
    return {"home": home, "version": None}


def _devices() -> dict[str, Any]:
    from dataclasses import asdict

    try:
        from daskinfer.device import detect, load_torch
    except ImportError:
        return {}
    devices = [asdict(backend) for backend in detect().backends]
    try:
        threads = load_torch().get_num_threads()
    except ImportError:
        threads = None
    return {"devices": devices, "torch_threads": threads}


class ByValue:
    """A function that takes its code along when it is pickled."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        import importlib

        import cloudpickle  # type: ignore[import-untyped]

        module = importlib.import_module(self._function.__module__)
        cloudpickle.register_pickle_by_value(module)
        try:
            return cloudpickle.loads, (cloudpickle.dumps(self._function),)
        finally:
            cloudpickle.unregister_pickle_by_value(module)
