"""What can be known of a version's weights, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dask.utils import format_bytes

from daskinfer.device.registry import has_own_memory
from daskinfer.wording import counted

_SOURCES = {"host": "from host memory", "disk": "from disk", "": "from elsewhere"}


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """Where the weights of a version are. Printed, a line for a reader.

    Attributes
    ----------
    nbytes
        What they take on a device.
    device, host, disk
        How many workers have them in the device's memory; in that of the host, from
        where they come back without being read; and neither, as others have the room.
    loads
        How often workers have loaded them, by where they came from: ``"host"`` and
        ``"disk"`` are the worker's own, ``""`` are other workers and the scheduler.
    evictions
        How often they had to make room for other models.

    Examples
    --------
    >>> print(WeightsStatus(2**30, 1, 0, 1, {"": 2, "disk": 3}, 4))
    1.00 GiB on 1 worker of 2; loaded 2 times from elsewhere, 3 times from disk; \
evicted 4 times
    """

    nbytes: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    loads: Mapping[str, int] = field(default_factory=dict)
    evictions: int = 0

    @property
    def is_swapped(self) -> bool:
        """Whether there was ever too little room for them."""
        return bool(self.host or self.disk or self.evictions)

    def __str__(self) -> str:
        workers = self.device + self.host + self.disk
        told = [
            f"{format_bytes(self.nbytes)} on {counted(self.device, 'worker')} of "
            f"{workers}"
            + (f", in host memory on {counted(self.host, 'other')}" * bool(self.host)),
            "loaded "
            + ", ".join(
                f"{counted(count, 'time')} {_SOURCES[source]}"
                for source, count in sorted(self.loads.items())
            ),
        ]
        if self.evictions:
            told.append(f"evicted {counted(self.evictions, 'time')}")
        return "; ".join(told)


def too_large(
    name: str,
    version: str,
    nbytes: int,
    room: float,
    kind: str,
    address: str,
    *,
    memory: str = "the memory",
    kept: int = 0,
) -> str:
    """Why a model is refused on a worker, with the numbers.

    Parameters
    ----------
    name, version, nbytes
        The model, and the bytes that it takes.
    room, kind, address
        The bytes that models may take, on which kind of device, and where.
    memory
        What to call the device.
    kept
        Bytes of those that others have for good.

    Examples
    --------
    >>> about = "big", "1", 3 * 2**30, 2**30, "npu", "tcp://w:1"
    >>> print(too_large(*about, memory="npu:0"))
    'big' '1' takes 3.00 GiB, and models may take 1.00 GiB of npu:0 of tcp://w:1: \
raise daskinfer.weights.device, or deploy it to workers with more memory
    """
    setting = "device" if has_own_memory(kind) else "host"
    others = f", of which {format_bytes(kept)} are kept for others" if kept else ""
    return (
        f"{name!r} {version!r} takes {format_bytes(nbytes)}, and models may take "
        f"{format_bytes(int(room))} of {memory} of {address}{others}: raise "
        f"daskinfer.weights.{setting}, or deploy it to workers with more memory"
    )
