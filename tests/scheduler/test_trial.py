"""When a canary is given up."""

from __future__ import annotations

import random

import pytest

from daskinfer import AbortPolicy
from scheduler_plugins.statistics import Figures
from scheduler_plugins.trial import Trial, least_error_rate


def figures(answers: int = 0, failures: int = 0, latency: float = 0.01) -> Figures:
    made = Figures()
    add(made, answers, failures, latency)
    return made


def add(made: Figures, answers: int, failures: int = 0, latency: float = 0.01) -> None:
    for _ in range(answers):
        made.succeeded(latency)
    for _ in range(failures):
        made.failed()


def test_the_interval_holds_the_true_rate_as_often_as_it_says():
    generator = random.Random(0)
    missed = 0
    for _ in range(2000):
        failures = sum(generator.random() < 0.1 for _ in range(100))
        missed += least_error_rate(failures, 100) > 0.1
    assert missed < 0.01 * 2000  # half of 1 % on the lower side


def test_nothing_is_decided_before_enough_requests():
    canary = figures(failures=9)
    trial = Trial(AbortPolicy(min_requests=10), canary, figures(100))
    assert trial.verdict() is None
    canary.failed()
    assert trial.verdict() == (
        "10 of its 10 requests failed, and 0 of 0 of the active version"
    )


def test_errors_that_both_versions_have_tell_nothing():
    canary, stable = Figures(), figures(100, 900)
    trial = Trial(AbortPolicy(), canary, stable)
    add(stable, 50, 50)
    add(canary, 50, 50)
    assert trial.verdict() is None
    # What the active version had before is not counted.
    add(stable, 5_000)
    add(canary, 0, 1)
    assert "51 of its 101 requests failed, and 50 of 5,100" in str(trial.verdict())


def test_a_few_failures_are_no_proof():
    canary = figures(28, 2)
    trial = Trial(AbortPolicy(max_error_rate=0.05), canary, figures())
    assert trial.verdict() is None


@pytest.mark.parametrize(
    ("ratio", "gives_up"), [(None, False), (3, False), (1.5, True)]
)
def test_latency_is_compared_by_medians(ratio, gives_up):
    canary, stable = figures(30, latency=0.02), figures(100)
    # One that is far out moves a mean, and no median.
    add(stable, 1, latency=100.0)
    trial = Trial(AbortPolicy(max_latency_ratio=ratio), canary, stable)
    told = trial.verdict()
    assert (told is not None) == gives_up
    if gives_up:
        assert told == (
            "its median latency is 20 ms, and that of the active version 10 ms"
        )


def test_what_was_found_in_a_cache_says_nothing_of_latency():
    canary, stable = figures(30, latency=0.02), figures(30, latency=0.02)
    for _ in range(1000):
        stable.succeeded(None)
    assert (stable.requests, stable.measured) == (1030, 30)
    assert Trial(AbortPolicy(max_latency_ratio=1), canary, stable).verdict() is None
    # Nor is anything compared with an old version that had nothing to compute.
    stable = figures()
    for _ in range(1000):
        stable.succeeded(None)
    assert Trial(AbortPolicy(max_latency_ratio=1), canary, stable).verdict() is None


def test_latency_needs_enough_answers_of_both():
    trial = Trial(AbortPolicy(max_latency_ratio=1), figures(30, latency=9), figures(19))
    assert trial.verdict() is None


@pytest.mark.parametrize(
    ("about", "error", "match"),
    [
        ({"max_error_rate": 1.1}, ValueError, "max_error_rate must be between 0 and 1"),
        ({"max_error_rate": "5%"}, TypeError, "max_error_rate must be a number"),
        (
            {"max_latency_ratio": 0.5},
            ValueError,
            "max_latency_ratio must be at least 1",
        ),
        ({"min_requests": 0}, ValueError, "min_requests must be at least 1"),
    ],
)
def test_a_policy_that_makes_no_sense(about, error, match):
    with pytest.raises(error, match=match):
        AbortPolicy(**about)
