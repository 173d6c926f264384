"""A worker's figures for Prometheus; see :mod:`daskinfer.exposition`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic

from daskinfer.exposition import Collector

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from daskinfer.worker.runtime import InferenceRuntime

_WORKER = ("worker",)
_CACHE = ("worker", "deployment", "tier")


class WorkerCollector(Collector):
    """Tells of all workers of this process, of which there is one as a rule."""

    sources: list[InferenceRuntime]

    def figures(self) -> Iterator[Metric]:
        """Read all figures."""
        if self.sources:
            yield from self._models()
            yield from self._caches()
            yield from self._devices()

    def _each(
        self, figure: Callable[[InferenceRuntime], float]
    ) -> list[tuple[tuple[str, ...], float]]:
        return [((_address(source),), figure(source)) for source in self.sources]

    def _models(self) -> Iterator[Metric]:
        yield self.gauge(
            "models_loaded",
            "Models that are on the worker's device",
            _WORKER,
            self._each(lambda runtime: len(runtime.loader.models)),
        )
        yield self.gauge(
            "models_parked",
            "Models that are kept in the host's memory, off the device",
            _WORKER,
            self._each(lambda runtime: len(runtime.loader.parking)),
        )
        yield self.gauge(
            "models_parked_bytes",
            "What those take",
            _WORKER,
            self._each(lambda runtime: runtime.loader.parking.nbytes),
        )
        yield self.gauge(
            "batches_waiting",
            "Batches that a worker has, with the one that it runs",
            _WORKER,
            self._each(lambda runtime: len(runtime.jobs)),
        )

    def _caches(self) -> Iterator[Metric]:
        told = [
            ((_address(source), name), figures)
            for source in self.sources
            for name, figures in source.caches.figures(monotonic()).items()
        ]
        tiers = [
            ((*about, tier["name"]), tier)
            for about, figures in told
            for tier in figures["tiers"]["tiers"]
        ]

        def each(field: str) -> list[tuple[tuple[str, ...], float]]:
            return [(about, tier[field]) for about, tier in tiers]

        for name, field, text in (
            ("cache_entries", "entries", "Results that a tier of a cache holds"),
            ("cache_bytes", "nbytes", "Bytes that a tier of a cache holds"),
            ("cache_limit_bytes", "budget", "Bytes that a tier of a cache may hold"),
        ):
            yield self.gauge(name, text, _CACHE, each(field))
        for name, field, text in (
            ("cache_hits_total", "hits", "Look-ups that were found in a tier"),
            ("cache_misses_total", "misses", "Look-ups that a tier passed on"),
            ("cache_evictions_total", "evictions", "Results that made room in a tier"),
            (
                "cache_expirations_total",
                "expirations",
                "Results that have outlived their time in a tier",
            ),
            (
                "cache_promotions_total",
                "promotions",
                "Results that a hit has brought up into a tier",
            ),
            ("cache_refused_total", "refused", "Results that a tier could not take"),
        ):
            yield self.counter(name, text, _CACHE, each(field))
        yield self.counter(
            "cache_skipped_total",
            "Requests that were not looked up or not kept, and those answered "
            "with what was computed for an equal one",
            ("worker", "deployment", "reason"),
            [
                ((*about, reason), count)
                for about, figures in told
                for reason, count in figures["counts"].items()
            ],
        )

    def _devices(self) -> Iterator[Metric]:
        told = [
            ((_address(source), figures["device"], figures["name"]), figures)
            for source in self.sources
            for figures in source.telemetry.devices()
        ]
        if not told:
            return
        labels = ("worker", "device", "name")
        for name, field, text in (
            (
                "device_memory_used_bytes",
                "memory-used",
                "Memory of an accelerator that is taken, by whomever",
            ),
            ("device_memory_total_bytes", "memory-total", "Memory of an accelerator"),
            (
                "device_utilization_ratio",
                "utilization",
                "Busy share of an accelerator, where its driver tells",
            ),
        ):
            unit = 0.01 if field == "utilization" else 1  # Dask tells percent
            known: list[tuple[tuple[str, ...], Any]] = [
                (about, unit * figures[field])
                for about, figures in told
                if figures[field] is not None
            ]
            yield self.gauge(name, text, labels, known)


def _address(runtime: InferenceRuntime) -> str:
    return str(runtime.worker.address)


#: The one of this process.
COLLECTOR = WorkerCollector()
