"""Figures on the ``/metrics`` that Dask's HTTP servers have, for Prometheus.

Nothing here needs ``prometheus_client`` before it is asked for figures.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import dask.config
from distributed.http.prometheus import PrometheusCollector

from daskinfer.logs import Log

if TYPE_CHECKING:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )

logger = Log("exposition")

_Family = TypeVar("_Family", "CounterMetricFamily", "GaugeMetricFamily")

#: The values of the labels, and the figure.
Samples: TypeAlias = "Iterable[tuple[tuple[str, ...], float]]"


class Buckets(Protocol):
    """What a histogram must tell."""

    @property
    def total(self) -> float:
        """The sum of all values."""

    def cumulative(self) -> list[tuple[float, int]]:
        """For each bound, how many values were not above it."""


class Collector(PrometheusCollector):
    """Reads figures of one kind of server when Prometheus asks for them.

    There is one in a process. A process may have several servers, in tests for
    instance, one after the other or at the same time.

    Attributes
    ----------
    sources
        Whose figures are read, in the order in which they have started.
    """

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[no-untyped-call]
        self.subsystem = "inference"
        self.sources: list[Any] = []
        self._is_registered = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.sources}>"

    def add(self, source: Any) -> None:
        """Read the figures of one more server from now on."""
        self.sources.append(source)
        # As it is configured by now.
        self.namespace = dask.config.get("distributed.dashboard.prometheus.namespace")
        if not self._is_registered:
            with contextlib.suppress(ModuleNotFoundError):
                from prometheus_client import REGISTRY

                REGISTRY.register(self)
                self._is_registered = True

    def discard(self, source: Any) -> None:
        """Read those of a server no longer."""
        if source in self.sources:
            self.sources.remove(source)

    def figures(self) -> Iterator[Metric]:
        """Read all figures."""
        raise NotImplementedError

    def collect(self) -> Iterator[Metric]:
        """Read all figures; an error must not keep Dask's own from being told."""
        try:
            yield from self.figures()
        except Exception:
            logger.exception("Not all figures could be read")

    def name(self, name: str) -> str:
        """A metric's whole name."""
        return str(self.build_name(name))  # type: ignore[no-untyped-call]

    def counter(
        self, name: str, text: str, labels: Sequence[str], samples: Samples
    ) -> CounterMetricFamily:
        """Counters, whose names end in ``_total``."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(self.name(name), text, labels=labels)
        return _filled(family, samples)

    def gauge(
        self, name: str, text: str, labels: Sequence[str], samples: Samples
    ) -> GaugeMetricFamily:
        """Figures that go up and down."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(self.name(name), text, labels=labels)
        return _filled(family, samples)

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        samples: Iterable[tuple[tuple[str, ...], Buckets]],
    ) -> HistogramMetricFamily:
        """How many values were how large."""
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self.name(name), text, labels=labels)
        for values, found in samples:
            buckets = [
                ("+Inf" if bound == math.inf else str(bound), count)
                for bound, count in found.cumulative()
            ]
            family.add_metric(values, buckets, found.total)
        return family


def _filled(family: _Family, samples: Samples) -> _Family:
    for values, figure in samples:
        family.add_metric(values, figure)
    return family
