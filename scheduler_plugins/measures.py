"""What is measured of the batches and answers of one deployment version.

Pure: plain numbers, which are read when somebody asks for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from scheduler_plugins.histogram import DURATIONS, RATIOS, ROWS, Histogram
from scheduler_plugins.stream_measures import StreamMeasures

__all__ = ["Measures"]


@dataclass(slots=True)
class Measures:
    """Histograms and counters of one version.

    Attributes
    ----------
    wait, response
        Seconds from a request's arrival until the batch was sent that answered it, and
        until it was answered.
    execution
        Seconds that batches took on the device.
    pass_rows
        Rows of each forward pass, without padding.
    accuracy
        What batches took, as a multiple of what was expected when they were sent.
    sent
        Batches by the reason why they were sent; see
        :class:`~scheduler_plugins.batching.Send`.
    rows, padded_rows
        In the passes; and those that were added to reach an allowed size.
    predicted, measured
        Seconds that batches were expected to take, and what the same ones took.
    retries
        How often requests were sent once more.
    interrupted
        Attempts of requests that the engine has seen fail, by what happened.
    openings
        How often a worker's breaker has opened.
    streams
        What is measured of answers that come piece by piece.

    Examples
    --------
    >>> measures = Measures()
    >>> measures.dispatched("full", retries=0)
    >>> measures.ran([(32, 32), (8, 16)], seconds=0.05, predicted=0.04)
    >>> measures.answered(wait=0.01, response=0.07)
    >>> measures.rows, measures.padded_rows, measures.sent["full"]
    (40, 8, 1)
    >>> measures.accuracy.cumulative()[7]
    (1.25, 1)
    """

    wait: Histogram = field(default_factory=partial(Histogram, DURATIONS))
    response: Histogram = field(default_factory=partial(Histogram, DURATIONS))
    execution: Histogram = field(default_factory=partial(Histogram, DURATIONS))
    pass_rows: Histogram = field(default_factory=partial(Histogram, ROWS))
    accuracy: Histogram = field(default_factory=partial(Histogram, RATIOS))
    sent: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    padded_rows: int = 0
    predicted: float = 0.0
    measured: float = 0.0
    retries: int = 0
    interrupted: Counter[str] = field(default_factory=Counter)
    openings: int = 0
    streams: StreamMeasures = field(default_factory=StreamMeasures)

    def answered(self, wait: float, response: float) -> None:
        """Count an answer, in seconds since the request arrived."""
        # It may have arrived anew while a late answer was on its way.
        self.wait.observe(max(wait, 0.0))
        self.response.observe(response)

    def dispatched(self, reason: str, retries: int) -> None:
        """Count a batch that was sent, and those in it that were sent before."""
        self.sent[reason] += 1
        self.retries += retries

    def ran(
        self,
        passes: Iterable[tuple[int, int]],
        seconds: float,
        predicted: float | None,
    ) -> None:
        """Count a batch that has run.

        Parameters
        ----------
        passes
            Rows of each, and with padding.
        seconds
            What it took on the device.
        predicted
            What it was expected to take; None if it is no test of that.
        """
        for rows, padded in passes:
            self.pass_rows.observe(rows)
            self.rows += rows
            self.padded_rows += padded - rows
        self.execution.observe(seconds)
        if predicted is not None and predicted > 0:
            self.predicted += predicted
            self.measured += seconds
            self.accuracy.observe(seconds / predicted)
