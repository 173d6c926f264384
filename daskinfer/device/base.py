"""What a device is to the rest of daskinfer, and what detection reports."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from daskinfer.exceptions import InferenceError

if TYPE_CHECKING:
    import torch


class DeviceNotFound(InferenceError):
    """A device was asked for that this process cannot use.

    Parameters
    ----------
    spec : str
        The device that was asked for, such as ``"npu:1"``.
    reason : str
        Why there is none, and what to do about it.

    Examples
    --------
    >>> print(DeviceNotFound("npu", "torch_npu is not installed"))
    device 'npu' cannot be used: torch_npu is not installed
    """

    def __init__(self, spec: str, reason: str) -> None:
        super().__init__(spec, reason)
        self.spec = spec
        self.reason = reason

    def __str__(self) -> str:
        return f"device {self.spec!r} cannot be used: {self.reason}"


def text_of(exc: BaseException) -> str:
    """What an exception says; nothing if its own code fails to put it into words.

    Examples
    --------
    >>> text_of(ValueError("no"))
    'no'
    """
    try:
        return str(exc)
    except Exception:
        return ""


@dataclass(frozen=True)
class BackendReport:
    """How many devices of one kind there are, and why that many.

    Attributes
    ----------
    kind : str
        ``"npu"``, ``"cuda"`` or ``"cpu"``.
    count : int
        Number of usable devices.
    reason : str
        What was found, or what stands in the way and how to get around it.
    names : tuple of str
        The devices' names in the order of their indices; empty where asking for them
        would have opened the devices.
    """

    kind: str
    count: int
    reason: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceReport:
    """What detection found: one `BackendReport` per back-end, most wanted first.

    Examples
    --------
    >>> report = DeviceReport(
    ...     (
    ...         BackendReport("npu", 0, "torch_npu is not installed"),
    ...         BackendReport("cpu", 1, "2 threads"),
    ...     )
    ... )
    >>> report.best, report["npu"].reason
    ('cpu', 'torch_npu is not installed')
    """

    backends: tuple[BackendReport, ...]

    @property
    def best(self) -> str:
        """Kind of the first back-end that has a device; ``"cpu"`` if none has."""
        return next((b.kind for b in self.backends if b.count), "cpu")

    def __getitem__(self, kind: str) -> BackendReport:
        for backend in self.backends:
            if backend.kind == kind:
                return backend
        raise KeyError(kind)

    def __str__(self) -> str:
        return "\n".join(f"{b.kind}: {b.count} ({b.reason})" for b in self.backends)


class Device(ABC):
    """One device of this process.

    Every method may be called from any thread.  `put`, `to_host` and a forward pass
    belong inside `active`, because a thread of a pool keeps the current device of
    whatever ran in it before.

    Attributes
    ----------
    kind : str
        ``"npu"``, ``"cuda"`` or ``"cpu"``.
    has_own_memory : bool
        Whether models there take other memory than that of the process.
    torch_device : torch.device
        Where tensors and models live.
    name : str
        The product's name, such as ``"Ascend910B1"``.
    device_class : str
        Equal for devices that are equally fast; timings are learned per class.
    """

    kind: ClassVar[str]
    has_own_memory: ClassVar[bool] = True
    torch_device: torch.device
    name: str
    device_class: str

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the calling thread's current device within the block."""
        yield

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give `tensor` on this device; the tensor itself if it is there already.

        The copy of a pinned tensor may still run when this returns; work that is
        queued on the device afterwards sees it complete.
        """

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give `tensor` on the CPU, complete and detached from the autograd graph.

        Waits for the work that produces it, so an error of that work is raised here.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the device is done; raises its errors."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Give ``(free, total)`` bytes of the device, all its users counted."""

    @abstractmethod
    def allocated(self) -> int:
        """Bytes this process holds there: tensors, or on the CPU the resident set."""

    @abstractmethod
    def utilization(self) -> float | None:
        """Busy share of the device in 0..1; None where the driver does not tell."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Return memory that torch keeps for reuse to the device."""

    @abstractmethod
    def is_out_of_memory(self, exc: BaseException) -> bool:
        """Whether `exc` says that the device's memory did not suffice."""

    @abstractmethod
    def is_fatal(self, exc: BaseException) -> bool:
        """Whether `exc` leaves the device unusable until the process is restarted."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.torch_device} {self.name!r}>"
