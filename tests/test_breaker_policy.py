"""What a user may say about circuit breakers."""

from __future__ import annotations

from typing import Any

import pytest

from daskinfer import BreakerPolicy, config


def test_durations_are_seconds() -> None:
    policy = BreakerPolicy(5, "1m", "500ms", "2m")
    assert (policy.failures, policy.window) == (5, 60.0)
    assert (policy.cooldown, policy.max_cooldown) == (0.5, 120.0)
    assert BreakerPolicy(**policy.to_message()) == policy


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"failures": 0}, ValueError),
        ({"failures": 1.5}, TypeError),
        ({"window": 0}, ValueError),
        ({"window": None}, TypeError),
        ({"cooldown": "soon"}, ValueError),
        ({"cooldown": 10, "max_cooldown": 5}, ValueError),
        ({"max_cooldown": [1]}, TypeError),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(wrong))):
        BreakerPolicy(**wrong)


@pytest.mark.parametrize("value", [0.5, "many", None, float("inf"), True])
def test_a_bad_factor_is_refused_with_its_key(value: object) -> None:
    import dask

    with (
        dask.config.set({"daskinfer.health.suspect-factor": value}),
        pytest.raises(ValueError, match=r"daskinfer\.health\.suspect-factor is"),
    ):
        config.number("health.suspect-factor", minimum=1)
