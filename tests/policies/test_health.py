"""When workers are given no more requests, and when again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer import BreakerPolicy
from scheduler_plugins.breaker import Breaker, BreakerState
from scheduler_plugins.health import Health, Suspicion, is_to_blame

A, B = "tcp://a:1", "tcp://b:1"
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
POLICIES = st.builds(
    lambda failures, window, cooldown, growth: BreakerPolicy(
        failures, window, cooldown, cooldown * growth
    ),
    st.integers(1, 4),
    st.floats(1, 100),
    st.floats(0.5, 20),
    st.floats(1, 10),
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["open", "doubt", "probe"]), st.floats(0.0, 10.0)),
    max_size=60,
)


@given(POLICIES, EVENTS)
def test_a_breaker_stays_within_its_policy(policy, events):
    breaker = Breaker(policy)
    now, opened, span = 0.0, -math.inf, policy.cooldown
    for number, (event, later) in enumerate(events):
        now += later
        before = breaker.state(now)
        if event == "probe":
            if breaker.wants_probe(now):
                assert before is HALF_OPEN
                breaker.try_with(f"batch-{number}")
                # One at a time.
                assert not breaker.wants_probe(now) and breaker.next() == math.inf
            continue
        if event == "doubt":
            assert breaker.doubt(now, "r") == (before is CLOSED)
            if before is CLOSED:
                assert breaker.wants_probe(now)
            continue
        changed = breaker.open(now, "r")
        assert changed == (before is not OPEN)
        if changed:
            assert breaker.state(now) is OPEN and breaker.probe is None
            # Each time twice as long as the last, up to the maximum.
            assert breaker.next() - now == pytest.approx(span)
            opened, span = now, min(2 * span, policy.max_cooldown)
        elif before is OPEN:
            assert breaker.next() >= opened + policy.cooldown * (1 - 1e-9)
        assert (breaker.reason is None) == breaker.is_closed


def test_failures_outside_of_the_window_are_forgotten():
    health = Health(BreakerPolicy(failures=3, window=10))

    def fail(now: float) -> object:
        for _ in range(100):
            health.answered(B, "b")
        return refuse(health, A, now)

    assert [fail(11.0 * number) for number in range(20)] == [None] * 20
    assert [fail(220.0), fail(221.0), fail(222.0)] == [None, None, OPEN]


@given(st.integers(0, 200), st.integers(0, 1000))
def test_nobody_is_blamed_without_others_that_answer(failed, others_failed):
    assert not is_to_blame(failed, others_failed, 0)


@given(st.integers(1, 30), st.integers(0, 200), st.integers(1, 200))
def test_more_failures_and_more_answers_of_others_are_more_evidence(failed, bad, good):
    if is_to_blame(failed, bad, good):
        assert is_to_blame(failed + 1, bad, good)
        assert is_to_blame(failed, bad, good + 1)
    else:
        assert not is_to_blame(failed, bad + 1, good)


def refuse(health: Health, address: str, now: float, batch: str = "b") -> object:
    return health.refused(address, batch, now, now + 1.0, "it fails")


def test_bad_inputs_open_no_breaker():
    """Half of all batches fail, on every worker alike."""
    health = Health(BreakerPolicy())
    for i in range(1000):
        assert refuse(health, A, float(i)) is None
        assert refuse(health, B, float(i)) is None
        for worker in (A, B) if i % 2 else ():
            assert health.answered(worker, "b") is None
    assert health.is_perfect and health.next(0.0) == math.inf


def test_a_flood_of_bad_inputs_opens_no_breaker():
    health = Health(BreakerPolicy())
    health.answered(A, "b")
    health.answered(B, "b")
    for i in range(100):
        assert refuse(health, A, float(i)) is refuse(health, B, float(i)) is None


def test_retries_are_no_evidence():
    """One worker has all first attempts, which fail, and another the second."""
    health = Health(BreakerPolicy())
    for i in range(1000):
        assert refuse(health, A, float(i)) is None
        assert health.answered(B, "b", retry=True) is None
        now, until = float(i), i + 1.0
        assert health.refused("c", "b", now, until, "it fails", retry=True) is None
        assert health.rests(A, i + 0.5) == (i >= 1) and not health.rests("c", i + 0.5)


def test_a_worker_that_always_fails_is_found_out():
    health = Health(BreakerPolicy(cooldown=5))
    state, refused = None, 0
    while state is None and refused < 50:
        refused += 1
        state = refuse(health, A, float(refused))
        health.answered(B, "b")
        # From the second on it gets no more of them than one that does its work.
        assert health.rests(A, refused + 0.5) == (refused >= 2)
    assert state is OPEN and 3 <= refused <= 10
    assert not health.admits(A) and health.admits(B)
    now = refused + 5.0
    assert health.next(float(refused)) in (refused + 1.0, now)
    assert health.candidates(now) == [A]
    health.try_with(A, "probe")
    assert health.candidates(now) == []
    assert refuse(health, A, now, "probe") is OPEN
    # For twice as long, and so on, however long ago the first failures are.
    assert health.candidates(now + 9.9) == []
    assert health.candidates(now + 10.0) == [A]
    health.try_with(A, "again")
    assert health.answered(A, "other") is None
    assert health.answered(A, "again") is CLOSED
    assert health.is_perfect and health.admits(A)


def test_a_worker_that_was_late_is_proven_by_an_answer_of_any_kind():
    health = Health(BreakerPolicy(cooldown=1))
    health.open(A, 0.0, "late")
    health.try_with(A, "probe")
    assert refuse(health, A, 2.0, "probe") is CLOSED
    assert health.admits(A)


def test_a_probe_that_nobody_wants_any_more_is_replaced():
    health = Health(BreakerPolicy(cooldown=1))
    health.open(A, 0.0, "late")
    health.try_with(A, "probe")
    health.undecided(A, "other")
    assert health.candidates(2.0) == []
    health.undecided(A, "probe")
    assert health.candidates(2.0) == [A]


def test_a_worker_takes_its_breaker_with_it():
    health = Health(BreakerPolicy(failures=1))
    assert health.open(A, 0.0, "no")
    assert health.state(A, 0.0) == (OPEN, "no")
    refuse(health, A, 0.0)
    health.forget(A)
    assert health.is_perfect and health.state(A, 0.0) == (CLOSED, None)


@given(st.floats(1, 100), st.floats(0.1, 100), st.floats(0, 100))
def test_no_batch_is_suspect_before_its_time(factor, after, predicted):
    limit = Suspicion(factor, after).limit(predicted)
    assert limit >= after and limit >= factor * predicted
    assert limit in (after, factor * predicted)
