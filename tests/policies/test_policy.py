from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from datetime import timedelta
from typing import Any

import pytest

from daskinfer.policy import DEFAULT_MAX_WAIT, BatchPolicy


def test_defaults() -> None:
    policy = BatchPolicy()
    assert policy == BatchPolicy(64, 1, None, None, None, 0)
    assert type(policy.max_batch_size) is int
    assert policy.hold == 0


@pytest.mark.parametrize(
    "wait", ["5ms", "0.005s", 0.005, "5000us", timedelta(milliseconds=5)]
)
def test_durations_become_seconds(wait: Any) -> None:
    policy = BatchPolicy(min_batch_size=2, max_wait=wait, target_latency=wait)
    assert policy.max_wait == pytest.approx(0.005)
    assert policy.target_latency == pytest.approx(0.005)
    assert policy.hold == policy.max_wait


def test_a_minimum_without_a_wait_has_a_bound() -> None:
    assert BatchPolicy(min_batch_size=4).hold == DEFAULT_MAX_WAIT
    assert BatchPolicy(min_batch_size=4).max_wait is None
    assert BatchPolicy(min_batch_size=4, max_wait=0).hold == 0


def test_allowed_sizes_are_sorted_and_set_the_maximum() -> None:
    policy = BatchPolicy(allowed_batch_sizes=[16, 1, 4, 4])  # type: ignore[arg-type]
    assert policy.allowed_batch_sizes == (1, 4, 16)
    assert policy.max_batch_size == 16
    assert BatchPolicy(allowed_batch_sizes=(1, 128)).max_batch_size == 128


def test_an_explicit_maximum_is_never_raised() -> None:
    policy = BatchPolicy(max_batch_size=64, allowed_batch_sizes=(1, 64, 128))
    assert policy.max_batch_size == 64
    assert policy.allowed_batch_sizes == (1, 64)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("min_batch_size", {"min_batch_size": 65}),
        ("max_batch_size", {"max_batch_size": 0}),
        ("max_batch_size", {"max_batch_size": -1}),
        ("min_batch_size", {"min_batch_size": 0}),
        ("max_batch_size", {"max_batch_size": 8, "allowed_batch_sizes": [1, 4, 16]}),
        ("max_batch_size", {"max_batch_size": 64, "allowed_batch_sizes": [1, 4, 16]}),
        ("allowed_batch_sizes", {"allowed_batch_sizes": []}),
        ("allowed_batch_sizes", {"allowed_batch_sizes": [0, 4]}),
        ("max_wait", {"max_wait": "5ms"}),
        ("max_wait", {"max_wait": "-5ms", "min_batch_size": 2}),
        ("max_wait", {"max_wait": -1, "min_batch_size": 2}),
        ("max_wait", {"max_wait": "soon", "min_batch_size": 2}),
        ("max_wait", {"max_wait": "", "min_batch_size": 2}),
        ("max_wait", {"max_wait": "5 parsecs", "min_batch_size": 2}),
        ("max_wait", {"max_wait": float("nan"), "min_batch_size": 2}),
        ("max_wait", {"max_wait": float("inf"), "min_batch_size": 2}),
        ("target_latency", {"target_latency": 0}),
        ("target_latency", {"target_latency": "-1s"}),
        ("batch_dim", {"batch_dim": -1}),
    ],
)
def test_contradictions_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=field):
        BatchPolicy(**fields)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_batch_size", {"max_batch_size": True}),
        ("max_batch_size", {"max_batch_size": 8.0}),
        ("max_batch_size", {"max_batch_size": "8"}),
        ("max_batch_size", {"max_batch_size": None}),
        ("min_batch_size", {"min_batch_size": 1.5}),
        ("allowed_batch_sizes", {"allowed_batch_sizes": 4}),
        ("allowed_batch_sizes", {"allowed_batch_sizes": "148"}),
        ("allowed_batch_sizes", {"allowed_batch_sizes": [1, True]}),
        ("max_wait", {"max_wait": True, "min_batch_size": 2}),
        ("max_wait", {"max_wait": [1], "min_batch_size": 2}),
        ("batch_dim", {"batch_dim": "0"}),
        ("batch_dim", {"batch_dim": False}),
    ],
)
def test_wrong_types_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=field):
        BatchPolicy(**fields)


def test_is_a_value() -> None:
    policy = BatchPolicy(min_batch_size=4, max_wait="5ms")  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(replace(policy))
    assert replace(policy, max_batch_size=16).max_wait == 0.005
    assert replace(BatchPolicy(min_batch_size=4), min_batch_size=1).hold == 0
    with pytest.raises(FrozenInstanceError):
        policy.max_batch_size = 3  # type: ignore[misc]
