"""The back-ends, most wanted first: what they have, and how to open a device."""

from __future__ import annotations

from daskinfer.device.base import BackendReport, Device, DeviceNotFound, DeviceReport
from daskinfer.device.cpu import CpuDevice
from daskinfer.device.cuda import CudaDevice
from daskinfer.device.npu import NpuDevice

BACKENDS: tuple[type[NpuDevice] | type[CudaDevice] | type[CpuDevice], ...] = (
    NpuDevice,
    CudaDevice,
    CpuDevice,
)


def detect() -> DeviceReport:
    """Say which devices this process can use, and why no others.

    Imports torch, opens no device, and never fails: whatever goes wrong is the reason
    in the report.

    Examples
    --------
    >>> detect()["cpu"].count
    1
    """
    return DeviceReport(tuple(_report(backend) for backend in BACKENDS))


def _report(
    backend: type[NpuDevice] | type[CudaDevice] | type[CpuDevice],
) -> BackendReport:
    try:
        return backend.report()
    except Exception as error:
        reason = f"detection failed: {type(error).__name__}: {error}"
        return BackendReport(backend.kind, 0, reason)


def has_own_memory(kind: str) -> bool:
    """Whether models on this kind of device take other memory than the process's.

    Examples
    --------
    >>> has_own_memory("npu"), has_own_memory("cpu")
    (True, False)
    """
    return next(backend for backend in BACKENDS if backend.kind == kind).has_own_memory


def parse_device(spec: str) -> tuple[str, int | None]:
    """Split a device's name into kind and index.

    Parameters
    ----------
    spec : str
        ``"auto"``, ``"npu"``, ``"cuda"``, ``"cpu"``, or one with an index:
        ``"npu:1"``.

    Raises
    ------
    ValueError
        If it is none of these.

    Examples
    --------
    >>> parse_device("npu:1"), parse_device("auto")
    (('npu', 1), ('auto', None))
    """
    kind, colon, index = spec.partition(":")
    kinds = [backend.kind for backend in BACKENDS]
    indexed = not colon or (kind in kinds and index.isascii() and index.isdigit())
    if kind not in ("auto", *kinds) or not indexed:
        raise ValueError(
            f"device={spec!r} is unknown: use 'auto', 'npu', 'cuda', 'cpu', or one of "
            "the kinds with an index, such as 'npu:1'"
        )
    return kind, int(index) if colon else None


def open_device(spec: str = "auto") -> Device:
    """Open a device of this process.

    Parameters
    ----------
    spec : str
        ``"auto"`` takes the first of npu, cuda and cpu that is there; a kind without
        an index takes its device 0.  An index counts the devices that are visible to
        this process.

    Raises
    ------
    ValueError
        If `spec` is no device's name.
    DeviceNotFound
        If there is no such device; says why.

    Examples
    --------
    >>> open_device("cpu").kind
    'cpu'
    """
    kind, index = parse_device(spec)
    report = detect()
    if kind == "auto":
        kind = report.best
    found = report[kind]
    if not found.count:
        raise DeviceNotFound(spec, found.reason)
    if index is not None and index >= found.count:
        last = found.count - 1
        reason = f"the highest {kind} index of this process is {last}: {found.reason}"
        raise DeviceNotFound(spec, reason)
    backend = next(backend for backend in BACKENDS if backend.kind == kind)
    try:
        return backend(index or 0)
    except (RuntimeError, AssertionError) as error:
        raise DeviceNotFound(spec, f"it could not be opened: {error}") from error
