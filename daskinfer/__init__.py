"""Cluster inference on Dask: deploy a model, call it through Dask futures.

>>> import daskinfer
>>> daskinfer.BatchPolicy(max_batch_size=32).max_batch_size
32
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskinfer import config as _config  # registers the defaults with Dask
from daskinfer import transport as _transport
from daskinfer.breaker import BreakerPolicy
from daskinfer.cache import TierPolicy
from daskinfer.caching import CachePolicy
from daskinfer.canary import AbortPolicy
from daskinfer.client import deployments, get, info
from daskinfer.deployment import deploy
from daskinfer.exceptions import (
    BatchTimeout,
    DeadlineExceeded,
    DeploymentExists,
    DeploymentFailed,
    DeployTimeout,
    DeviceError,
    InferenceError,
    ModelTooLarge,
    NoPreviousVersion,
    NoReadyWorker,
    NoUpdate,
    OutOfDeviceMemory,
    OutputMismatch,
    Overloaded,
    SchedulerLost,
    StreamStalled,
    UnknownDeployment,
    UpdateAborted,
    UpdateFailed,
    UpdateInProgress,
    VersionExists,
    VersionNotReady,
    WorkerLost,
)
from daskinfer.gather import gather
from daskinfer.handle import Model
from daskinfer.imap.files import run_files
from daskinfer.policy import BatchPolicy
from daskinfer.retry import RetryPolicy
from daskinfer.status import DeploymentStatus, RequestInfo
from daskinfer.stepping import StepModel, run_steps
from daskinfer.story import Story, StoryEntry
from daskinfer.streaming import Step, StreamPolicy

if TYPE_CHECKING:
    from daskinfer.cluster import LocalCluster
    from daskinfer.device_workers import DeviceWorkers
    from daskinfer.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "AbortPolicy",
    "BatchPolicy",
    "BatchTimeout",
    "BreakerPolicy",
    "CachePolicy",
    "DeadlineExceeded",
    "DeployTimeout",
    "DeploymentExists",
    "DeploymentFailed",
    "DeploymentStatus",
    "DeviceError",
    "DeviceWorkers",
    "InferenceError",
    "LocalCluster",
    "Model",
    "ModelTooLarge",
    "NoPreviousVersion",
    "NoReadyWorker",
    "NoUpdate",
    "OutOfDeviceMemory",
    "OutputMismatch",
    "Overloaded",
    "RequestInfo",
    "RetryPolicy",
    "SchedulerLost",
    "Step",
    "StepModel",
    "Story",
    "StoryEntry",
    "Stream",
    "StreamPolicy",
    "StreamStalled",
    "TierPolicy",
    "UnknownDeployment",
    "UpdateAborted",
    "UpdateFailed",
    "UpdateInProgress",
    "VersionExists",
    "VersionNotReady",
    "WorkerLost",
    "deploy",
    "deployments",
    "gather",
    "get",
    "info",
    "run_files",
    "run_steps",
]

# Results may be tensors that Dask's own serializer does not know.
_transport.register()

del _config, _transport


def __getattr__(name: str) -> Any:
    # The cluster module imports half of Dask; scheduler and workers don't need it.
    if name == "LocalCluster":
        from daskinfer.cluster import LocalCluster

        return LocalCluster
    if name == "DeviceWorkers":
        from daskinfer.device_workers import DeviceWorkers

        return DeviceWorkers
    if name == "Stream":
        from daskinfer.stream import Stream

        return Stream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
