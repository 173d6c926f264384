"""What can be known of a deployment and of a single answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as a deployment sees it.

    Attributes
    ----------
    address
        The worker's Dask address.
    state
        ``"loading"``, ``"ready"``, ``"failed"`` or ``"ineligible"``.
    healthy
        Whether requests are sent there now.
    device, device_class
        Such as ``"npu:0"`` and ``"npu/Ascend910B1"``; None before it is loaded.
    batches, rows
        Answered by this worker for this deployment.
    in_flight
        Batches sent and not answered.
    load
        Seconds until its device is expected to be free.
    latency
        Mean seconds of a forward pass there; None before the first.
    reason
        Why it is not ready, if it is not.
    """

    address: str
    state: str
    healthy: bool
    device: str | None = None
    device_class: str | None = None
    batches: int = 0
    rows: int = 0
    in_flight: int = 0
    load: float = 0.0
    latency: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version of a deployment."""

    version: str
    digest: str
    active: bool
    workers_ready: int
    #: Learned ``(rows, seconds, measurements)`` per device class.
    latency: dict[str, tuple[tuple[int, float, int], ...]] = field(default_factory=dict)
    #: The batch size with the best learned throughput, per device class.
    best_batch_size: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LatencyPercentiles:
    """Seconds from arrival at the scheduler to the answer, of recent requests."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    mean: float | None = None


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """What the scheduler knows of one deployment.

    Attributes
    ----------
    name, active_version
        What is deployed, and which version answers.
    versions, workers
        One entry each.
    requests, successes, failures, cancelled
        Requests since the deployment began: all that arrived, and how they ended.
    waiting, in_flight
        Requests not sent to a worker yet, and sent but not answered.
    batches, rows, padded_rows, passes
        Batches sent and answered, rows of the requests in them, rows added to
        reach an allowed size, and forward passes run.
    mean_batch_size
        Rows per forward pass, without padding; None before the first.
    throughput
        Answered requests per second over the last ten seconds.
    latency
        Percentiles over the last few thousand requests.
    problem
        Why waiting requests are not served, where that is so.
    """

    name: str
    active_version: str
    versions: tuple[VersionStatus, ...]
    workers: tuple[WorkerStatus, ...]
    requests: int
    successes: int
    failures: int
    cancelled: int
    waiting: int
    in_flight: int
    batches: int
    passes: int
    rows: int
    padded_rows: int
    mean_batch_size: float | None
    throughput: float
    latency: LatencyPercentiles
    problem: str | None = None

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> DeploymentStatus:
        """Rebuild from plain data as the scheduler sends it.

        Parameters
        ----------
        message
            What :func:`dataclasses.asdict` made of a status.
        """
        message = dict(message)
        message["versions"] = tuple(
            VersionStatus(
                **{
                    **version,
                    "latency": {
                        device_class: tuple((r, s, n) for r, s, n in table)
                        for device_class, table in version["latency"].items()
                    },
                }
            )
            for version in message["versions"]
        )
        message["workers"] = tuple(WorkerStatus(**w) for w in message["workers"])
        message["latency"] = LatencyPercentiles(**message["latency"])
        return cls(**message)


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """How one answer came about; see :func:`daskinfer.info`.

    Attributes
    ----------
    name, version
        The deployment and version that made it.
    worker, device
        Where.
    batch_size
        Rows of the batch it was part of.
    queue_seconds
        From arrival at the scheduler until its batch was sent.
    compute_seconds
        What its batch took on the device.
    attempts
        How often it was sent to a worker.
    """

    name: str
    version: str
    worker: str
    device: str
    batch_size: int
    queue_seconds: float
    compute_seconds: float
    attempts: int
