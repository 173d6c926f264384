"""The scheduler's figures for Prometheus; see :mod:`daskinfer.exposition`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from distributed.metrics import monotonic

from daskinfer.exposition import Collector, Samples
from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.deployment import ReplicaState
from scheduler_plugins.versions import stage

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.line import Line

_DEPLOYMENT = ("deployment",)
_VERSION = ("deployment", "version")
_WORKER = ("deployment", "version", "worker")

_BREAKER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class SchedulerCollector(Collector):
    """Tells of the plugin that was started last in this process, and still runs."""

    @property
    def plugin(self) -> InferencePlugin | None:
        """Whose figures are read."""
        return self.sources[-1] if self.sources else None

    def figures(self) -> Iterator[Metric]:
        """Read all figures."""
        plugin = self.plugin
        if plugin is None:
            return
        lines = list(plugin.dispatcher.lines.values())
        yield from self._requests(plugin)
        yield from self._queue(plugin, lines)
        yield from self._histograms(lines)
        yield from self._batches(lines)
        yield from self._versions(plugin, lines)
        yield from self._workers(plugin, lines)

    def _requests(self, plugin: InferencePlugin) -> Iterator[Metric]:
        lines = plugin.dispatcher.lines
        yield self.counter(
            "requests_received_total",
            "Requests that have arrived; one that is repeated counts again",
            _DEPLOYMENT,
            [((name,), c.requests) for name, c in lines.statistics.items()],
        )
        ended = {name: counts.outcomes for name, counts in lines.statistics.items()}
        yield self.counter(
            "requests_total",
            "Requests that have ended, by how and why; with an empty name, those to a "
            "deployment that is not there, or not any more",
            ("deployment", "outcome", "reason"),
            [
                ((name, *how), count)
                for name, outcomes in ({"": lines.elsewhere} | ended).items()
                for how, count in outcomes.items()
            ],
        )
        yield self.counter(
            "version_requests_total",
            "Requests that have ended with a version, by how",
            ("deployment", "version", "outcome"),
            [
                ((*_label(line), outcome), count)
                for line in lines.values()
                for outcome, count in (
                    ("answered", line.figures.requests - line.figures.failures),
                    ("failed", line.figures.failures),
                )
            ],
        )
        yield self.gauge(
            "ready",
            "Whether requests to a deployment would be answered now",
            _DEPLOYMENT,
            [
                ((name,), problem is None)
                for name, problem in plugin.readiness.problems().items()
            ],
        )

    def _queue(self, plugin: InferencePlugin, lines: list[Line]) -> Iterator[Metric]:
        now = monotonic()
        batches = list(plugin.dispatcher.running.batches.values())
        yield self.gauge(
            "queue_length",
            "Requests that wait to be sent to a worker",
            _VERSION,
            _each(lines, lambda line: len(line.queue) + line.delayed),
        )
        yield self.gauge(
            "queue_wait_seconds",
            "For how long those have waited whose turn is next",
            _VERSION,
            _each(lines, lambda line: _longest_wait(line, now)),
        )
        yield self.gauge(
            "in_flight_requests",
            "Requests that were sent to a worker and are not answered",
            _VERSION,
            _each(
                lines,
                lambda line: sum(len(b.requests) for b in batches if b.line is line),
            ),
        )
        yield self.gauge(
            "in_flight_batches",
            "Batches that were sent to a worker and are not answered",
            _VERSION,
            _each(lines, lambda line: line.in_flight),
        )

    def _histograms(self, lines: list[Line]) -> Iterator[Metric]:
        for name, attribute, text in (
            (
                "request_wait_seconds",
                "wait",
                "From a request's arrival until the batch was sent that answered it",
            ),
            (
                "request_duration_seconds",
                "response",
                "From a request's arrival to its answer",
            ),
            (
                "batch_execution_seconds",
                "execution",
                "What batches took on the device",
            ),
            ("pass_rows", "pass_rows", "Rows of each forward pass, without padding"),
            (
                "prediction_ratio",
                "accuracy",
                "What batches took, as a multiple of what was expected at that time",
            ),
        ):
            yield self.histogram(
                name,
                text,
                _VERSION,
                [
                    (_label(line), getattr(line.figures.measures, attribute))
                    for line in lines
                ],
            )

    def _batches(self, lines: list[Line]) -> Iterator[Metric]:
        yield self.counter(
            "batches_sent_total",
            "Batches that were sent, by the reason why at that time",
            ("deployment", "version", "reason"),
            [
                ((*_label(line), reason), count)
                for line in lines
                for reason, count in line.figures.measures.sent.items()
            ],
        )
        yield self.counter(
            "attempts_interrupted_total",
            "Attempts of requests that did not end with an answer of the model",
            ("deployment", "version", "reason"),
            [
                ((*_label(line), reason), count)
                for line in lines
                for reason, count in line.figures.measures.interrupted.items()
            ],
        )
        for name, attribute, text in (
            ("rows_total", "rows", "Rows that were run, without padding"),
            (
                "padded_rows_total",
                "padded_rows",
                "Rows added to reach an allowed size",
            ),
            (
                "predicted_seconds_total",
                "predicted",
                "What batches were expected to take on the device",
            ),
            ("measured_seconds_total", "measured", "What the same batches took there"),
            ("retries_total", "retries", "How often requests were sent once more"),
            (
                "breaker_openings_total",
                "openings",
                "How often a worker was given no more requests for being unfit",
            ),
        ):
            yield self.counter(
                name,
                text,
                _VERSION,
                [
                    (_label(line), getattr(line.figures.measures, attribute))
                    for line in lines
                ],
            )

    def _versions(self, plugin: InferencePlugin, lines: list[Line]) -> Iterator[Metric]:
        registry = plugin.registry
        versions = registry.versions()
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
                        *_label(line),
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
                ((*_label(line), kind), line.batcher.best_size(kind))
                for line in lines
                for kind in sorted({d.device_class for d in line.devices.values()})
            ],
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

    def _workers(self, plugin: InferencePlugin, lines: list[Line]) -> Iterator[Metric]:
        now = monotonic()
        yield self.gauge(
            "breaker_state",
            "0: a worker is given requests; 1: it is tried with one; 2: it gets none",
            _WORKER,
            [
                ((*_label(line), address), _breaker(line, address, now))
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


def _label(line: Line) -> tuple[str, str]:
    return line.name, line.version


def _each(lines: Iterable[Line], figure: Callable[[Line], float]) -> Samples:
    return [(_label(line), figure(line)) for line in lines]


def _longest_wait(line: Line, now: float) -> float:
    heads = [lane.head() for lane in line.queue.oldest(1)]
    return max((now - head.arrived for head in heads if head is not None), default=0.0)


def _breaker(line: Line, address: str, now: float) -> int:
    if line.devices[address].stuck:
        return _BREAKER[BreakerState.OPEN]
    return _BREAKER[line.health.state(address, now)[0]]


#: The one of this process.
COLLECTOR = SchedulerCollector()
