"""What can be known of a deployment and of a single answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from daskinfer.cache.totals import CacheStatus
from daskinfer.weights import WeightsStatus
from daskinfer.wording import counted


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as a deployment sees it.

    Attributes
    ----------
    address
        The worker's Dask address.
    state
        ``"starting"`` until it has told its devices, then ``"loading"``, ``"ready"``,
        ``"failed"`` or, if it may not serve the deployment, ``"ineligible"``. One
        that is ``"cold"`` has no room for it now, and loads it when it is asked for.
    healthy
        Whether requests are sent there now. One that is ready is not if it is late,
        paused or closing, or if its breaker is not closed; printed, it is ``unfit``.
    device, device_class
        Such as ``"npu:0"`` and ``"npu/Ascend910B1"``; None before it is loaded.
    batches, rows
        Answered by this worker for this deployment.
    in_flight
        Batches sent and not answered, those included whose requests run elsewhere by
        now because it is late.
    load
        Seconds until its device is expected to be free.
    latency
        Mean seconds of a forward pass there; None before the first.
    reason
        Why it is not ready, if it is not, or is given no requests.
    breaker
        ``"closed"`` if requests are sent there, ``"open"`` if not, because of failures
        or because it does not answer; ``"half-open"`` while one request is to tell.
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
    breaker: str = "closed"


@dataclass(frozen=True, slots=True)
class LatencyPercentiles:
    """Seconds from arrival at the scheduler to the answer, of recent requests."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    mean: float | None = None


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version of a deployment.

    Attributes
    ----------
    version, digest
        Its label, and what tells its content from any other.
    active
        Whether it answers, canaries aside.
    workers_ready
        How many workers can answer with it.
    latency
        Learned ``(rows, seconds, measurements)`` per device class.
    best_batch_size
        The batch size with the best learned throughput, per device class.
    stage
        ``"registered"`` before any worker has begun; ``"loading"``, ``"warming"`` or
        ``"ready"``, as far as the last of them is; ``"canary"``, ``"active"``,
        ``"draining"`` while its last batches run, ``"previous"`` after that.
    share
        The part of the requests that it answers as a canary.
    requests, failures
        How many ended there, and how many of them with an error.
    response
        Seconds from a request's arrival to its answer, of those that were computed.
    problems
        Why workers are not ready for it, by address.
    weights
        Where its weights are.
    """

    version: str
    digest: str
    active: bool
    workers_ready: int
    latency: dict[str, tuple[tuple[int, float, int], ...]] = field(default_factory=dict)
    best_batch_size: dict[str, int] = field(default_factory=dict)
    stage: str = "registered"
    share: float = 0.0
    requests: int = 0
    failures: int = 0
    response: LatencyPercentiles = LatencyPercentiles()
    problems: dict[str, str] = field(default_factory=dict)
    weights: WeightsStatus = field(default_factory=WeightsStatus)


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """What the scheduler knows of one deployment.

    Printed, it is a few lines for a reader. What runs is counted in requests in the
    second line, and in batches in the table. A worker that is ready and gets no
    requests all the same is ``unfit`` there; the last lines say why.

    Attributes
    ----------
    name, active_version
        What is deployed, and which version answers.
    versions, workers
        One entry each.
    requests, successes, failures, cancelled
        Requests since the deployment began: all that arrived, and how they ended. One
        whose result was lost with its worker and is computed again counts again, and
        so does one that ``client.retry`` repeats.
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
    cache
        What can be known of its cached results; None where there are none.
    last_update
        How the last update ended, in words; None before, and while one is under way.

    Examples
    --------
    >>> print(
    ...     DeploymentStatus(
    ...         "resnet50",
    ...         "2",
    ...         (VersionStatus("1", "", False, 0), VersionStatus("2", "", True, 1)),
    ...         (
    ...             WorkerStatus(
    ...                 "tcp://10.0.0.1:1", "ready", True, "npu:0", None, 40, 600, 1
    ...             ),
    ...             WorkerStatus("tcp://10.0.0.2:1", "failed", False, reason="no disk"),
    ...         ),
    ...         *(640, 610, 2, 1, 20, 7),  # requests
    ...         *(40, 44, 600, 8, 600 / 44, 12.5),  # batches
    ...         LatencyPercentiles(0.0042, 0.0061, 1.2, 0.005),
    ...     )
    ... )
    resnet50, version 2 (1 worker ready); also 1 (0 workers ready)
    requests: 640 (610 answered, 2 failed, 1 cancelled, 20 waiting, 7 running)
    batches:  40 (600 rows, 13.6 a pass, 8 padded)
    speed:    12.5 answers/s; latency p50 4.2 ms, p95 6.1 ms, p99 1200.0 ms
    worker            state   device  batches  rows  running batches  latency
    tcp://10.0.0.1:1  ready   npu:0        40   600                1        -
    tcp://10.0.0.2:1  failed  -             0     0                0        -
    problem with tcp://10.0.0.2:1: no disk
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
    last_update: str | None = None
    cache: CacheStatus | None = None

    def version(self, label: str) -> VersionStatus:
        """One version by its label.

        Raises
        ------
        KeyError
            If it is not there.
        """
        for found in self.versions:
            if found.version == label:
                return found
        raise KeyError(f"{self.name!r} has no version {label!r}")

    def __str__(self) -> str:
        rows = counted(self.rows, "row")
        if self.mean_batch_size is not None:
            rows += f", {self.mean_batch_size:.1f} a pass"
        lines = [
            self._versions(),
            f"requests: {self.requests:,} ({self.successes:,} answered, "
            f"{self.failures:,} failed, {self.cancelled:,} cancelled, "
            f"{self.waiting:,} waiting, {self.in_flight:,} running)",
            f"batches:  {self.batches:,} ({rows}, {self.padded_rows:,} padded)",
            f"speed:    {self.throughput:,.1f} answers/s; latency "
            f"p50 {_milliseconds(self.latency.p50)}, "
            f"p95 {_milliseconds(self.latency.p95)}, "
            f"p99 {_milliseconds(self.latency.p99)}",
            *self._table(),
        ]
        lines += [
            # Being tried again is no problem.
            f"{'about' if worker.breaker == 'half-open' else 'problem with'} "
            f"{worker.address}: {worker.reason}"
            for worker in self.workers
            if worker.reason
        ]
        lines += [
            f"weights of version {version.version}: {version.weights}"
            for version in self.versions
            if version.weights.is_swapped
        ]
        lines += [f"problem: {self.problem}"] * bool(self.problem)
        lines += [f"last update: {self.last_update}"] * bool(self.last_update)
        lines += [] if self.cache is None else [str(self.cache)]
        return "\n".join(lines)

    def _versions(self) -> str:
        told = {
            v.version: f"{v.version} ({counted(v.workers_ready, 'worker')} ready"
            f"{self._unfit() if v.version == self.active_version else ''})"
            for v in self.versions
        }
        active = told.pop(self.active_version, self.active_version)
        others = f"; also {', '.join(told.values())}" if told else ""
        return f"{self.name}, version {active}{others}"

    def _unfit(self) -> str:
        unfit = sum(w.state == "ready" and not w.healthy for w in self.workers)
        return f", {unfit:,} of them unfit" if unfit else ""

    def _table(self) -> list[str]:
        if not self.workers:
            return ["no workers"]
        columns = {
            "worker": [w.address for w in self.workers],
            "state": [_state(w) for w in self.workers],
            "breaker": [w.breaker for w in self.workers],
            "device": [w.device or "-" for w in self.workers],
            "batches": [f"{w.batches:,}" for w in self.workers],
            "rows": [f"{w.rows:,}" for w in self.workers],
            "running batches": [f"{w.in_flight:,}" for w in self.workers],
            "latency": [_milliseconds(w.latency) for w in self.workers],
        }
        if all(breaker == "closed" for breaker in columns["breaker"]):
            del columns["breaker"]
        texts = ("worker", "state", "breaker", "device")
        aligned = []
        for title, cells in columns.items():
            width = max(map(len, (title, *cells)))
            align = str.ljust if title in texts else str.rjust
            aligned.append([align(cell, width) for cell in (title, *cells)])
        return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]

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
                    "response": LatencyPercentiles(**version["response"]),
                    "weights": WeightsStatus(**version["weights"]),
                }
            )
            for version in message["versions"]
        )
        message["workers"] = tuple(WorkerStatus(**w) for w in message["workers"])
        if message["cache"] is not None:
            message["cache"] = CacheStatus.from_message(message["cache"])
        message["latency"] = LatencyPercentiles(**message["latency"])
        return cls(**message)


def _state(worker: WorkerStatus) -> str:
    return "unfit" if worker.state == "ready" and not worker.healthy else worker.state


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """How one answer came about; see :func:`daskinfer.info`.

    Attributes
    ----------
    name, version
        The deployment and version that made it.
    digest
        What tells that version's content from any other.
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
    cached
        Whether it was found in a cache, or computed for another request that was equal
        to it, rather than computed for its own.
    chunks
        How many it came in, if it came piece by piece.
    """

    name: str
    version: str
    digest: str
    worker: str
    device: str
    batch_size: int
    queue_seconds: float
    compute_seconds: float
    attempts: int
    cached: bool = False
    chunks: int = 0
