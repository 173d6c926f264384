"""Who is tried again, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer import RetryPolicy
from daskinfer.exceptions import (
    BatchTimeout,
    DeadlineExceeded,
    DeviceError,
    InferenceError,
    WorkerLost,
)
from scheduler_plugins.isolation import PARTS, divide
from scheduler_plugins.retrying import Fail, Retry, backoff, decide

DURATIONS = st.floats(0, 1e6)
POLICIES = st.builds(
    lambda attempts, times, jitter: RetryPolicy(
        attempts, min(times), max(times), jitter
    ),
    st.integers(1, 50),
    st.tuples(DURATIONS, DURATIONS),
    st.floats(0, 1),
)
CHANCES = st.floats(0, 1, exclude_max=True)


@given(POLICIES, st.integers(1, 10_000), CHANCES)
def test_the_wait_stays_within_its_bounds(policy, charges, chance):
    wait = backoff(policy, charges, chance)
    assert 0 <= wait <= policy.max_backoff
    assert wait <= backoff(policy, charges, 0.0)
    assert backoff(policy, charges, 0.0) <= backoff(policy, charges + 1, 0.0)
    # Even the luckiest waits for its share.
    floor = min(policy.backoff, policy.max_backoff) * (1 - policy.jitter)
    assert wait >= floor * (1 - 1e-9)


@given(POLICIES, st.integers(1, 100), CHANCES, st.floats(0, 1e9))
def test_the_budget_is_kept_exactly(policy, charges, chance, now):
    for kind in (WorkerLost, BatchTimeout, DeviceError):
        decision = decide(policy, kind, charges, now, chance)
        if charges >= policy.max_attempts:
            assert decision == Fail()
        else:
            assert isinstance(decision, Retry)
            assert decision.not_before >= now
    assert decide(policy, DeadlineExceeded, charges, now, chance) == Fail()


def test_after_the_loss_of_a_worker_nothing_is_waited_for():
    policy = RetryPolicy(backoff=1, jitter=0)
    assert decide(policy, WorkerLost, 1, 5.0, 0.5) == Retry(5.0)
    assert decide(policy, BatchTimeout, 1, 5.0, 0.5) == Retry(6.0)


def test_only_what_the_policy_names_is_tried_again():
    policy = RetryPolicy(retry_on=BatchTimeout)
    assert policy.retry_on == (BatchTimeout,)
    assert decide(policy, WorkerLost, 1, 0.0, 0.0) == Fail()
    assert decide(RetryPolicy(retry_on=[]), WorkerLost, 1, 0.0, 0.0) == Fail()


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"max_attempts": 0}, ValueError, "max_attempts"),
        ({"max_attempts": 1.5}, TypeError, "max_attempts"),
        ({"backoff": "-1s"}, ValueError, "backoff"),
        ({"backoff": None}, TypeError, "backoff"),
        ({"backoff": "soon"}, ValueError, "backoff"),
        ({"max_backoff": float("inf")}, ValueError, "max_backoff"),
        ({"backoff": "3s"}, ValueError, "backoff is 3 s, above max_backoff"),
        ({"jitter": 1.1}, ValueError, "jitter"),
        ({"jitter": float("nan")}, ValueError, "jitter"),
        ({"jitter": True}, TypeError, "jitter"),
        ({"retry_on": [ValueError]}, ValueError, "retry_on holds ValueError"),
        ({"retry_on": [InferenceError]}, ValueError, "retry_on holds InferenceError"),
        ({"retry_on": DeadlineExceeded}, ValueError, "retry_on holds Deadline"),
        ({"retry_on": ["WorkerLost"]}, ValueError, "retry_on holds 'WorkerLost'"),
        ({"retry_on": "WorkerLost"}, TypeError, "retry_on"),
        ({"retry_on": 3}, TypeError, "retry_on"),
    ],
)
def test_bad_fields_are_refused_by_name(fields, error, named):
    with pytest.raises(error, match=named):
        RetryPolicy(**fields)


@pytest.mark.parametrize(
    "policy",
    [RetryPolicy(), RetryPolicy(1, "1ms", "1s", 0, [WorkerLost, DeviceError])],
)
def test_a_policy_travels_as_plain_data(policy):
    message: dict[str, Any] = policy.to_message()
    assert RetryPolicy.from_message(message) == policy


@given(st.integers(0, 2000))
def test_a_batch_is_divided_into_nearly_equal_parts(n):
    parts = [list(part) for part in divide(range(n))]
    assert [x for part in parts for x in part] == list(range(n))
    assert len(parts) == min(n, PARTS)
    if parts:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
