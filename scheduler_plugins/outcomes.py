"""How requests end, in few words that can be counted. Pure.

Each way has an outcome (``"answered"``, ``"failed"``, ``"cancelled"``) and a reason.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from daskinfer.exceptions import (
    BatchTimeout,
    DeadlineExceeded,
    DeviceError,
    NoReadyWorker,
    OutOfDeviceMemory,
    Overloaded,
    StreamStalled,
    UnknownDeployment,
    WorkerLost,
)

if TYPE_CHECKING:
    from daskinfer.protocol import Failure

#: How many requests have ended in which way.
Outcomes: TypeAlias = "Counter[tuple[str, str]]"

#: Computed for it, or for another request; found in a cache.
COMPUTED = ("answered", "computed")
CACHED = ("answered", "cached")
#: Nobody wants it any more; Dask's ``client.restart`` has made an end of all.
RELEASED = ("cancelled", "released")
RESTARTED = ("cancelled", "restart")
#: The scheduler could not read the message that brought it.
REFUSED = ("failed", "refused")

#: Its inputs or options could not be read, or its inputs not be fetched.
INPUTS = "inputs"
#: The model raised an exception, or its output could not be divided.
MODEL = "model"
#: The deployment's ``placement`` raised one.
PLACEMENT = "placement"
#: Dask ended it: what it depends on has failed, for instance.
DASK = "dask"

# The first that fits.
_CAUSES: tuple[tuple[type[Exception], str], ...] = (
    (Overloaded, "overloaded"),
    (NoReadyWorker, "no_ready_worker"),
    (DeadlineExceeded, "deadline"),
    (UnknownDeployment, "unknown_deployment"),
    (WorkerLost, "worker_lost"),
    (BatchTimeout, "batch_timeout"),
    (DeviceError, "device_error"),
    (OutOfDeviceMemory, "out_of_memory"),
    (StreamStalled, "stream_stalled"),
)

#: Every reason for which a request can fail.
FAILURES = (
    *(word for _, word in _CAUSES),
    *(INPUTS, MODEL, PLACEMENT, DASK, REFUSED[1]),
)


def cause_of(kind: type[BaseException]) -> str:
    """Why a request fails with an error that was made on the scheduler.

    >>> cause_of(DeadlineExceeded), cause_of(NoReadyWorker), cause_of(TypeError)
    ('deadline', 'no_ready_worker', 'inputs')
    """
    return next((word for cls, word in _CAUSES if issubclass(kind, cls)), INPUTS)


def cause_on_worker(failure: Failure) -> str:
    """Why a request fails with an exception that came from a worker, unread."""
    for kind in (OutOfDeviceMemory, StreamStalled):
        if failure["exception_text"].startswith(kind.__name__):
            return cause_of(kind)
    return MODEL
