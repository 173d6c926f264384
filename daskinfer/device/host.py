"""What this host has, and the environment that gives a process one device of it.

One process per device is the rule: it sees only its own, under index 0.  Here is
what a parent needs for that; it asks a short-lived process, so that the parent itself
neither imports torch nor opens a device.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from daskinfer.device.base import BackendReport, DeviceReport
from daskinfer.device.cuda import CudaDevice
from daskinfer.device.loading import AUTOLOAD, load_torch, npu_is_installed
from daskinfer.device.npu import NpuDevice
from daskinfer.logs import Log

logger = Log("device")

RESOURCE_NAMES = {"npu": "NPU", "cuda": "GPU"}
"""The Dask resource that a worker declares for its device."""

VISIBILITY_VARIABLES = {
    backend.kind: backend.visibility_variable for backend in (NpuDevice, CudaDevice)
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Longer than a driver needs to start all its devices; a broken one can hang.
_PROBE_TIMEOUT = 120.0
_ANSWER = "daskinfer-devices "


@dataclass(frozen=True)
class HostDevice:
    """A device of this host.

    Attributes
    ----------
    kind : str
        ``"npu"`` or ``"cuda"``.
    index : int
        Index among the devices visible to this process.
    name : str
        The product's name.
    """

    kind: str
    index: int
    name: str


def host_devices() -> list[HostDevice]:
    """List the accelerators of this host; empty where there is none.

    Only devices that this process's environment leaves visible are listed, and only
    those of the best kind, because torch uses one kind in a process.  See
    `host_report` for the reasons.

    Examples
    --------
    >>> all(device.kind in ("npu", "cuda") for device in host_devices())
    True
    """
    report = host_report()
    if report.best == "cpu":
        return []
    names = report[report.best].names
    return [HostDevice(report.best, index, name) for index, name in enumerate(names)]


def host_report() -> DeviceReport:
    """Say which devices this host has, without opening one in this process.

    Never fails.  A short-lived process imports torch and looks, once for each setting
    of the environment variables that matter; on a host with torch's CPU build and no
    ``torch_npu`` there is nothing to look for.
    """
    torch_version = _installed_torch()
    if torch_version.endswith("+cpu") and not npu_is_installed():
        return DeviceReport(
            (
                NpuDevice.report(),
                BackendReport("cuda", 0, f"torch {torch_version} has no CUDA"),
                BackendReport("cpu", 1, f"torch {torch_version}"),
            )
        )
    watched = (*VISIBILITY_VARIABLES.values(), "LD_LIBRARY_PATH", "PYTHONPATH")
    try:
        return _ask_new_process(tuple(os.environ.get(name) for name in watched))
    except _NoAnswer as failure:
        logger.warning("Could not look for devices: %s", failure)
        return DeviceReport(
            (
                BackendReport("npu", 0, str(failure)),
                BackendReport("cuda", 0, str(failure)),
                BackendReport("cpu", 1, f"torch {torch_version}"),
            )
        )


def worker_environment(
    kind: str, index: int = 0, threads: int | None = None
) -> dict[str, str]:
    """Give the environment variables of a worker process that owns one device.

    They must be set before the process starts.

    Parameters
    ----------
    kind : str
        ``"npu"``, ``"cuda"``, or ``"cpu"`` for a process that sees no accelerator.
    index : int
        Index among the devices visible to this process; that device will be the new
        process's only one, under index 0.
    threads : int, optional
        Threads of one operation on the CPU.

    Raises
    ------
    ValueError
        If `kind` is unknown or the visibility variable of this process does not list
        that many devices.

    Examples
    --------
    >>> worker_environment("npu", 1, threads=4)["OMP_NUM_THREADS"]
    '4'
    """
    if kind not in (*VISIBILITY_VARIABLES, "cpu"):
        raise ValueError(f"kind={kind!r} is unknown: use 'npu', 'cuda' or 'cpu'")
    if kind == "cpu":
        environment = dict.fromkeys(VISIBILITY_VARIABLES.values(), "")
    else:
        variable = VISIBILITY_VARIABLES[kind]
        environment = {variable: _system_id(variable, index)}
    if kind != "npu" and npu_is_installed():
        environment[AUTOLOAD] = "0"
    if threads is not None:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    return environment


def _system_id(variable: str, index: int) -> str:
    """Translate an index of this process to what the variable must say."""
    visible = os.environ.get(variable)
    if visible is None:
        return str(index)
    ids = [part.strip() for part in visible.split(",") if part.strip()]
    if index >= len(ids):
        raise ValueError(f"index={index} is not in {variable}={visible!r}")
    return ids[index]


def _installed_torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


class _NoAnswer(Exception):
    """The process that was asked gave no report."""


# An exception is not cached: a driver that comes back is found.
@functools.cache
def _ask_new_process(environment: tuple[str | None, ...]) -> DeviceReport:
    # sys.path travels along, because what is importable here must be there too.
    code = "import sys; sys.path[:] = sys.argv[1:]; import daskinfer.device.host as h;"
    command = [sys.executable, "-c", f"{code} h._answer()", *sys.path]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT
        )
    except subprocess.TimeoutExpired as expired:
        reason = f"the driver did not answer within {_PROBE_TIMEOUT:.0f} s"
        raise _NoAnswer(reason) from expired
    for line in asked.stdout.splitlines():
        if line.startswith(_ANSWER):
            backends = json.loads(line.removeprefix(_ANSWER))
            return DeviceReport(
                tuple(
                    BackendReport(**{**fields, "names": tuple(fields["names"])})
                    for fields in backends
                )
            )
    last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
    raise _NoAnswer(
        f"the process that looks for devices ended with {asked.returncode}: {last}"
    )


def _answer() -> None:
    """Print this process's devices, as JSON on one line of standard output."""
    from daskinfer.device.registry import detect

    report = [asdict(backend) for backend in detect().backends]
    for backend in report:
        if backend["kind"] in VISIBILITY_VARIABLES and backend["count"]:
            vendor: Any = load_torch().get_device_module(backend["kind"])
            indices = range(backend["count"])
            backend["names"] = [vendor.get_device_name(index) for index in indices]
    print(f"\n{_ANSWER}{json.dumps(report)}", flush=True)
