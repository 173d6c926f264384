"""Counting what is measured, and how requests end."""

from __future__ import annotations

import math

import pytest

from daskinfer import exceptions
from daskinfer.failure import dump_failure
from scheduler_plugins.histogram import DURATIONS, RATIOS, ROWS, Histogram
from scheduler_plugins.measures import Measures
from scheduler_plugins.outcomes import FAILURES, INPUTS, cause_of, cause_on_worker


@pytest.mark.parametrize("bounds", [DURATIONS, ROWS, RATIOS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, math.nextafter(1.0, 2.0), 2.0, 1e9):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.cumulative() == [(1.0, 2), (2.0, 4), (math.inf, 5)]
    assert histogram.count == 5


def test_versions_share_no_histogram() -> None:
    one, other = Measures(), Measures()
    one.answered(0.1, 0.2)
    assert (one.wait.count, other.wait.count) == (1, 0)


def test_an_answer_before_its_own_attempt_did_not_wait() -> None:
    measures = Measures()
    measures.answered(-0.5, 0.2)
    assert measures.wait.total == 0.0


@pytest.mark.parametrize("predicted", [None, 0.0])
def test_what_is_no_test_of_a_prediction(predicted: float | None) -> None:
    measures = Measures()
    measures.ran([(4, 4)], 0.1, predicted)
    assert measures.accuracy.count == measures.measured == 0
    assert measures.execution.count == 1


def test_every_error_of_the_engine_that_ends_a_request_has_a_reason() -> None:
    kinds = [exceptions.RequestFailed]
    for kind in kinds:
        kinds += kind.__subclasses__()
    told = {kind: cause_of(kind) for kind in kinds}
    del told[exceptions.RequestFailed]
    del told[exceptions.SchedulerLost]  # clients raise it
    assert INPUTS not in told.values()
    assert set(told.values()) <= set(FAILURES)


def test_what_comes_from_a_worker() -> None:
    memory = exceptions.OutOfDeviceMemory("it does not fit")
    assert cause_on_worker(dump_failure(memory)) == "out_of_memory"
    assert cause_on_worker(dump_failure(ValueError("OutOfDeviceMemory"))) == "model"
