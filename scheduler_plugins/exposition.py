"""The scheduler's figures for Prometheus; see :mod:`daskinfer.exposition`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from distributed.metrics import monotonic

from daskinfer.exposition import Samples
from scheduler_plugins.whereabouts import VERSION, WhereaboutsCollector, label

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.line import Line

_DEPLOYMENT = ("deployment",)


class SchedulerCollector(WhereaboutsCollector):
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
        yield from self._streams(lines)
        yield from self.versions(plugin, lines)
        yield from self.workers(plugin, lines)

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
                ((*label(line), outcome), count)
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
            VERSION,
            _each(lines, lambda line: len(line.queue) + line.delayed),
        )
        yield self.gauge(
            "queue_wait_seconds",
            "For how long those have waited whose turn is next",
            VERSION,
            _each(lines, lambda line: line.waited(now)),
        )
        yield self.gauge(
            "workers_wanted",
            "Workers that requests need; Dask's own tasks may need more",
            (),
            [((), plugin.scaling.wanted())],
        )
        yield self.gauge(
            "in_flight_requests",
            "Requests that were sent to a worker and are not answered",
            VERSION,
            _each(
                lines,
                lambda line: (
                    sum(len(b.requests) for b in batches if b.line is line)
                    + line.streaming.total()
                ),
            ),
        )
        yield self.gauge(
            "in_flight_batches",
            "Batches that were sent to a worker and are not answered",
            VERSION,
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
                VERSION,
                [
                    (label(line), getattr(line.figures.measures, attribute))
                    for line in lines
                ],
            )

    def _batches(self, lines: list[Line]) -> Iterator[Metric]:
        yield self.counter(
            "batches_sent_total",
            "Batches that were sent, by the reason why at that time",
            ("deployment", "version", "reason"),
            [
                ((*label(line), reason), count)
                for line in lines
                for reason, count in line.figures.measures.sent.items()
            ],
        )
        yield self.counter(
            "attempts_interrupted_total",
            "Attempts of requests that did not end with an answer of the model",
            ("deployment", "version", "reason"),
            [
                ((*label(line), reason), count)
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
                VERSION,
                [
                    (label(line), getattr(line.figures.measures, attribute))
                    for line in lines
                ],
            )

    def _streams(self, lines: list[Line]) -> Iterator[Metric]:
        yield self.gauge(
            "live_streams",
            "Answers that come piece by piece, and have not ended",
            VERSION,
            _each(lines, lambda line: line.streaming.total()),
        )
        yield self.counter(
            "streams_total",
            "Answers that came piece by piece, by how they ended on a worker",
            ("deployment", "version", "outcome"),
            [
                ((*label(line), how), count)
                for line in lines
                for how, count in line.figures.measures.streams.outcomes.items()
            ],
        )
        for name, attribute, text in (
            ("stream_chunks_total", "chunks", "Chunks that were sent to readers"),
            ("stream_bytes_total", "nbytes", "Bytes that they had"),
        ):
            yield self.counter(
                name,
                text,
                VERSION,
                [
                    (label(line), getattr(line.figures.measures.streams, attribute))
                    for line in lines
                ],
            )
        for name, attribute, text in (
            (
                "stream_first_chunk_seconds",
                "first",
                "From a request's arrival to its first chunk",
            ),
            (
                "stream_between_chunks_seconds",
                "between",
                "From one chunk of a stream to the next",
            ),
        ):
            yield self.histogram(
                name,
                text,
                VERSION,
                [
                    (label(line), getattr(line.figures.measures.streams, attribute))
                    for line in lines
                ],
            )


def _each(lines: Iterable[Line], figure: Callable[[Line], float]) -> Samples:
    return [(label(line), figure(line)) for line in lines]


#: The one of this process.
COLLECTOR = SchedulerCollector()
