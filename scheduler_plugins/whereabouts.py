"""What is where: the scheduler's figures of versions and of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from distributed.metrics import monotonic

from daskinfer.exposition import Collector
from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.deployment import ReplicaState
from scheduler_plugins.versions import stage

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from scheduler_plugins.deployment import Version
    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.line import Line

VERSION = ("deployment", "version")
_WORKER = ("deployment", "version", "worker")

_BREAKER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class WhereaboutsCollector(Collector):
    """Reads what becomes of versions, and what workers do."""

    def versions(self, plugin: InferencePlugin, lines: list[Line]) -> Iterator[Metric]:
        """How far versions are, where they are, and what they take."""
        registry = plugin.registry
        versions = list(registry.versions())
        yield self.gauge(
            "replicas",
            "Workers by how far they are with a version",
            ("deployment", "version", "state"),
            [
                (
                    (version.name, version.version, state.value),
                    sum(r.state is state for r in version.replicas.values()),
                )
                for version in versions
                for state in ReplicaState
            ],
        )
        yield self.gauge(
            "version_stage",
            "1 for how far a version is in a roll-out",
            ("deployment", "version", "stage"),
            [
                (
                    (
                        *label(line),
                        stage(
                            registry.deployment(line.name),
                            registry.deployments[line.name].versions[line.version],
                            line.in_flight,
                        ),
                    ),
                    1,
                )
                for line in lines
            ],
        )
        yield self.gauge(
            "best_batch_size",
            "Rows with nearly the best throughput, as far as is known",
            ("deployment", "version", "device_class"),
            [
                ((*label(line), kind), line.batcher.best_size(kind))
                for line in lines
                for kind in sorted({d.device_class for d in line.devices.values()})
            ],
        )
        yield from self._weights(versions)

    def _weights(self, versions: Iterable[Version]) -> Iterator[Metric]:
        yield self.gauge(
            "model_bytes",
            "What the weights of a version take on a device",
            VERSION,
            [((v.name, v.version), v.nbytes) for v in versions],
        )
        yield self.counter(
            "model_loads_total",
            "How often workers have loaded a version, by where the weights came from",
            ("deployment", "version", "source"),
            [
                ((version.name, version.version, source or "elsewhere"), count)
                for version in versions
                for source, count in version.loads.items()
            ],
        )
        yield self.counter(
            "model_evictions_total",
            "How often a version had to make room for others on a worker",
            VERSION,
            [((v.name, v.version), v.evictions) for v in versions],
        )
        yield self.gauge(
            "model_load_seconds",
            "What a worker took to load a version, warm-up included",
            _WORKER,
            [
                ((version.name, version.version, replica.address), replica.seconds)
                for version in versions
                for replica in version.replicas.values()
                if replica.device is not None
            ],
        )

    def workers(self, plugin: InferencePlugin, lines: list[Line]) -> Iterator[Metric]:
        """What workers have done, and whether they are given more."""
        now = monotonic()
        yield self.gauge(
            "breaker_state",
            "0: a worker is given requests; 1: it is tried with one; 2: it gets none",
            _WORKER,
            [
                ((*label(line), address), _breaker(line, address, now))
                for line in lines
                for address in sorted(line.devices)
            ],
        )
        workers = [
            ((name, address), counts)
            for name, statistics in plugin.dispatcher.statistics.items()
            for address, counts in sorted(statistics.workers.items())
        ]
        labels = ("deployment", "worker")
        yield self.counter(
            "worker_rows_total",
            "Rows that a worker has run for a deployment",
            labels,
            [(values, counts.rows) for values, counts in workers],
        )
        yield self.counter(
            "worker_busy_seconds_total",
            "What a worker's forward passes for a deployment took",
            labels,
            [(values, counts.seconds) for values, counts in workers],
        )


def label(line: Line) -> tuple[str, str]:
    """The labels of a version."""
    return line.name, line.version


def _breaker(line: Line, address: str, now: float) -> int:
    if line.devices[address].stuck:
        return _BREAKER[BreakerState.OPEN]
    return _BREAKER[line.health.state(address, now)[0]]
