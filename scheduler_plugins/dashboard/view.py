"""What there is to see of the plugin at one moment, as plain rows.

Pure: reads the plugin's state, changes nothing, and knows nothing of Bokeh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from daskinfer.status import DeploymentStatus, LatencyPercentiles, WorkerStatus
from scheduler_plugins.diagnosis import unfitness
from scheduler_plugins.statistics import Statistics

if TYPE_CHECKING:
    from daskinfer.timing.curve import Curve
    from scheduler_plugins.deployment import Deployment
    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.line import Line

#: By kind of device, what workers call their measurements of it.
_METRICS = {"npu": "npu", "cuda": "gpu"}


@dataclass(frozen=True, slots=True)
class DeploymentRow:
    """One deployment at a glance.

    Attributes
    ----------
    name, version
        What is deployed, and which version answers.
    state
        ``"ready"``; ``"not ready"`` where no worker is, ``"cold"`` where one will be
        when it is asked; ``"waiting"`` where requests are not served although one is
        ready; or how far an update is.
    problem
        Why nobody serves it, or None.
    ready, workers, unfit
        Workers that can answer, of those that shall; and those of the first that are
        given no requests, as they fail or are late.
    requests, successes, failures, cancelled
        Requests that arrived, and how they ended.
    retries
        How often requests were sent once more.
    failed_by
        How many failed for which reason.
    waiting, delayed, in_flight
        Requests in the queue, those held back until their next attempt, and those
        that were sent.
    oldest
        Seconds that the next one to be served has waited.
    throughput
        Answers per second over the last ten seconds.
    passes, rows
        Forward passes, and rows in them.
    rows_by_worker
        The same by worker.
    best_size
        The learned best batch size; None before it is measured.
    latency
        Of the latest requests.
    """

    name: str
    version: str
    state: str = "not ready"
    problem: str | None = None
    ready: int = 0
    workers: int = 0
    unfit: int = 0
    requests: int = 0
    successes: int = 0
    failures: int = 0
    cancelled: int = 0
    retries: int = 0
    failed_by: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0
    delayed: int = 0
    in_flight: int = 0
    oldest: float = 0.0
    throughput: float = 0.0
    passes: int = 0
    rows: int = 0
    rows_by_worker: Mapping[str, int] = field(default_factory=dict)
    best_size: int | None = None
    latency: LatencyPercentiles = field(default_factory=LatencyPercentiles)

    @property
    def is_served(self) -> bool:
        """Whether requests are answered."""
        return self.state not in ("not ready", "waiting")


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as a deployment sees it, and what its device is doing.

    Attributes
    ----------
    status
        The deployment's side.
    memory, memory_limit
        Bytes of the device where they are known, else of the process; None where
        there is no limit.
    memory_of
        ``"device"`` or ``"process"``.
    utilization
        Of the device, between 0 and 1, as the worker measures it; None where it
        does not.
    """

    status: WorkerStatus
    memory: float = 0.0
    memory_limit: float | None = None
    memory_of: str = "process"
    utilization: float | None = None

    @property
    def label(self) -> str:
        """Its address, short.

        >>> WorkerRow(WorkerStatus("tcp://10.0.0.1:4711", "ready", True)).label
        '10.0.0.1:4711'
        """
        return self.status.address.split("://")[-1]


def deployments(plugin: InferencePlugin, now: float) -> list[DeploymentRow]:
    """One row for each deployment, by name.

    Parameters
    ----------
    plugin
        Whose state is read.
    now
        Monotonic time in seconds.
    """
    in_flight: Counter[str] = Counter()
    for batch in plugin.dispatcher.running.batches.values():
        in_flight[batch.line.name] += len(batch.requests)
    for stream in plugin.dispatcher.streams.live:
        in_flight[stream.line.name] += 1
    return [
        _row(plugin, plugin.registry.deployments[name], in_flight[name], now)
        for name in sorted(plugin.registry.deployments)
    ]


def _row(
    plugin: InferencePlugin, deployment: Deployment, in_flight: int, now: float
) -> DeploymentRow:
    dispatcher = plugin.dispatcher
    counts = dispatcher.statistics.get(deployment.name, Statistics())
    lines = dispatcher.lines.of(deployment.name)
    active = dispatcher.lines[deployment.name, deployment.active]
    version = deployment.versions[deployment.active]
    problem = plugin.diagnosis.problem(active)
    ready = len(version.ready())
    return DeploymentRow(
        name=deployment.name,
        version=deployment.active,
        state=_state(deployment, ready, problem),
        problem=problem,
        ready=ready,
        workers=len(version.replicas),
        unfit=sum(unfitness(active, a, now) is not None for a in active.devices),
        requests=counts.requests,
        successes=counts.successes,
        failures=counts.failures,
        cancelled=counts.cancelled,
        retries=sum(line.figures.measures.retries for line in lines),
        failed_by={
            reason: count
            for (outcome, reason), count in counts.outcomes.most_common()
            if outcome == "failed"
        },
        waiting=sum(len(line.queue) for line in lines),
        delayed=sum(line.delayed for line in lines),
        in_flight=in_flight,
        oldest=max((now - at for line in lines for at in _heads(line)), default=0.0),
        throughput=counts.throughput(now),
        passes=counts.passes,
        rows=counts.rows,
        rows_by_worker={a: done.rows for a, done in counts.workers.items()},
        best_size=_best_size(active),
        latency=counts.latency(),
    )


def _state(deployment: Deployment, ready: int, problem: str | None) -> str:
    update = deployment.update
    if not ready:
        return "not ready" if problem is not None else "cold"
    if update is not None:
        return f"{update.phase.value} {update.version}"
    return "ready" if problem is None else "waiting"


def _heads(line: Line) -> Iterator[float]:
    for lane in line.queue.oldest(1):
        head = lane.head()
        if head is not None:
            yield head.arrived


def _best_size(line: Line) -> int | None:
    kind = line.device_class
    return line.batcher.best_size(kind) if line.latency.sizes(kind) else None


def status(plugin: InferencePlugin, name: str) -> DeploymentStatus | None:
    """What :meth:`Model.status` tells, caches aside; None if it is not deployed."""
    deployment = plugin.registry.deployments.get(name)
    return None if deployment is None else plugin.descriptions.snapshot(deployment)


def learned(plugin: InferencePlugin, name: str, device_class: str) -> Curve | None:
    """What batches of the active version take, as the engine has learned it."""
    deployment = plugin.registry.deployments.get(name)
    if deployment is None:
        return None
    line = plugin.dispatcher.lines[name, deployment.active]
    return line.latency.curve(device_class)


def workers(plugin: InferencePlugin, found: DeploymentStatus) -> list[WorkerRow]:
    """The workers of a deployment, those that need attention first."""
    rows = [_worker(plugin, worker) for worker in found.workers]
    rows.sort(key=lambda row: (row.status.healthy, row.status.reason is None))
    return rows


def _worker(plugin: InferencePlugin, worker: WorkerStatus) -> WorkerRow:
    found = plugin.tasks.observed(worker.address)
    if found is None:
        return WorkerRow(worker)
    kind = _METRICS.get((worker.device or "").split(":")[0], "")
    metrics = found.telemetry(kind)
    used = metrics.get("memory-used")
    if used is None:
        used = found.metrics.get("memory", 0.0)
        return WorkerRow(worker, used, found.memory_limit or None)
    total = metrics.get("memory-total")
    percent = metrics.get("utilization")
    utilization = None if percent is None else percent / 100
    return WorkerRow(worker, used, total, "device", utilization)
