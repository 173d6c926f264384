"""The calls of those who want to know what is deployed, and how it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import monotonic

from daskinfer import protocol
from daskinfer.exceptions import UnknownDeployment
from daskinfer.status import DeploymentStatus, VersionStatus, WorkerStatus
from daskinfer.weights import WeightsStatus
from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.cache_calls import cache_status
from scheduler_plugins.deployment import Deployment, ReplicaState, Version
from scheduler_plugins.diagnosis import unfitness
from scheduler_plugins.statistics import Statistics
from scheduler_plugins.versions import stage

if TYPE_CHECKING:
    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.line import Line


class Descriptions:
    """Tells what can be known; changes nothing.

    Parameters
    ----------
    plugin
        Whose registry and dispatcher are asked.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin

    def __repr__(self) -> str:
        return f"<Descriptions by {self.plugin!r}>"

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        return {
            protocol.DESCRIBE: self.describe,
            protocol.STATUS: self.status,
            protocol.INFO: self.info,
        }

    async def describe(self) -> dict[str, Any]:
        """Names, versions and batch axes of what is deployed."""
        return {
            deployment.name: {
                "versions": {
                    label: deployment.versions[label].digest
                    for label in sorted(deployment.versions)
                },
                "active": deployment.active,
                "batch_dim": deployment.batch_dim,
                "max_batch_size": deployment.policy.max_batch_size,
                "max_queue": deployment.max_queue,
                "cached": deployment.cache is not None,
                "workers_ready": len(deployment.versions[deployment.active].ready()),
            }
            for deployment in self.plugin.registry
        }

    async def info(self, key: Key) -> dict[str, Any] | None:
        """How an answer came about; None if it is no answer of a deployment."""
        return self.plugin.tasks.metadata_of(key)

    async def status(self, name: str) -> dict[str, Any]:
        """A :class:`~daskinfer.DeploymentStatus`, as plain data."""
        try:
            deployment = self.plugin.registry.deployment(name)
        except UnknownDeployment as error:
            return {"status": "unknown", "message": str(error)}
        found = self.snapshot(deployment)
        cache = await cache_status(self.plugin.tasks, deployment)
        return {"status": "OK", "deployment": asdict(replace(found, cache=cache))}

    def snapshot(self, deployment: Deployment) -> DeploymentStatus:
        """What can be known without asking the workers."""
        dispatcher = self.plugin.dispatcher
        now = monotonic()
        counts = dispatcher.statistics.get(deployment.name, Statistics())
        lines = [dispatcher.lines[deployment.name, v] for v in deployment.versions]
        active = dispatcher.lines[deployment.name, deployment.active]
        return DeploymentStatus(
            name=deployment.name,
            active_version=deployment.active,
            versions=tuple(self._version(deployment, line) for line in lines),
            workers=tuple(self._worker(deployment, a, now) for a in self._addresses()),
            requests=counts.requests,
            successes=counts.successes,
            failures=counts.failures,
            cancelled=counts.cancelled,
            waiting=sum(len(line.queue) for line in lines),
            in_flight=sum(
                len(batch.requests)
                for batch in dispatcher.running.batches.values()
                if batch.line.name == deployment.name
            )
            + sum(line.streaming.total() for line in lines),
            batches=counts.batches,
            passes=counts.passes,
            rows=counts.rows,
            padded_rows=counts.padded_rows,
            mean_batch_size=counts.rows / counts.passes if counts.passes else None,
            throughput=counts.throughput(now),
            latency=counts.latency(),
            problem=self.plugin.diagnosis.problem(active),
            last_update=deployment.outcome,
        )

    def _addresses(self) -> list[str]:
        return sorted(self.plugin.registry.workers.keys() | self.plugin.tasks.workers())

    def _version(self, deployment: Deployment, line: Line) -> VersionStatus:
        version = deployment.versions[line.version]
        classes = sorted({d.device_class for d in line.devices.values()})
        return VersionStatus(
            version=version.version,
            digest=version.digest,
            active=version.version == deployment.active,
            workers_ready=len(version.ready()),
            stage=stage(deployment, version, line.in_flight),
            share=deployment.route.share
            if version.version == deployment.route.canary
            else 0.0,
            requests=line.figures.requests,
            failures=line.figures.failures,
            response=line.figures.latency(),
            problems={
                replica.address: replica.reason
                for replica in version.replicas.values()
                if replica.reason is not None
            },
            latency={kind: tuple(line.latency.table(kind)) for kind in classes},
            best_batch_size={kind: line.batcher.best_size(kind) for kind in classes},
            weights=_weights(version),
        )

    def _worker(self, deployment: Deployment, address: str, now: float) -> WorkerStatus:
        dispatcher = self.plugin.dispatcher
        facts = self.plugin.registry.workers.get(address)
        if facts is None:
            return WorkerStatus(address, "starting", False)
        replica = deployment.versions[deployment.active].replicas.get(address)
        if replica is None:
            return WorkerStatus(
                address, "ineligible", False, reason=deployment.refusal(facts)
            )
        line = dispatcher.lines[deployment.name, deployment.active]
        device = line.devices.get(address)
        done = dispatcher.statistics[deployment.name].workers.get(address)
        ready = replica.state is ReplicaState.READY
        unfit = unfitness(line, address, now)
        breaker, _ = line.health.state(address, now)
        if device and device.stuck:
            breaker = BreakerState.OPEN
        return WorkerStatus(
            address=address,
            state=replica.state.value,
            healthy=ready and not unfit and self.plugin.tasks.is_running(address),
            device=replica.device,
            device_class=replica.device_class,
            batches=done.batches if done else 0,
            rows=done.rows if done else 0,
            in_flight=len(device.under_way) if device else 0,
            load=max(device.expected_free(now, dispatcher.link) - now, 0.0)
            if device and device.flights
            else 0.0,
            latency=done.seconds / done.passes if done and done.passes else None,
            reason=replica.reason or unfit,
            breaker=breaker.value,
        )


def _weights(version: Version) -> WeightsStatus:
    parked = [
        address for address in version.cold if version.replicas[address].is_parked
    ]
    return WeightsStatus(
        version.nbytes,
        len(version.ready()),
        len(parked),
        len(version.cold) - len(parked),
        dict(version.loads),
        version.evictions,
    )
