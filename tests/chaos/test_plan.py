"""That a plan holds what it should, and is the same every time."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.plan import (
    BATCH_TIMEOUT,
    CLIENTS,
    LIMITED,
    WORKERS,
    Code,
    Kind,
    Plan,
)

SECONDS = 20.0

seeds = pytest.mark.parametrize("seed", range(1, 21))


@seeds
def test_a_plan_is_the_same_every_time(seed):
    assert Plan.of(seed, SECONDS) == Plan.of(seed, SECONDS)
    assert Plan.of(seed, SECONDS) != Plan.of(seed + 1, SECONDS)


@seeds
def test_everything_happens_in_a_short_plan(seed):
    plan = Plan.of(seed, SECONDS)
    assert {event.kind for event in plan.events} == set(Kind)
    assert plan.updates
    assert len(plan.scripts) == CLIENTS + 1
    # The last is killed before it has done all of it.
    scripts = plan.scripts[:-1]
    steps = [step for script in scripts for step in script]
    assert {step.way for step in steps} == {"submit", "map", "chain"}
    assert {code for step in steps for code in step.codes} == set(Code)
    assert any(step.cancelled for step in steps)
    assert any(step.timeout for step in steps)
    for number, script in enumerate(scripts):
        assert f"own{number}" in {step.name for step in script}


@seeds
def test_no_value_is_sent_twice(seed):
    values = Counter(
        step.first + i
        for script in Plan.of(seed, SECONDS).scripts
        for step in script
        for i in range(len(step.codes))
    )
    assert set(values.values()) == {1}


@seeds
def test_the_cluster_keeps_its_size(seed):
    count = WORKERS
    for event in Plan.of(seed, 600.0).events:
        count += {Kind.JOIN: 1, Kind.RETIRE: -1}.get(event.kind, 0)
        assert abs(count - WORKERS) <= 1


@seeds
def test_only_frozen_workers_are_beyond_the_time_limit_of_batches(seed):
    plan = Plan.of(seed, SECONDS)
    frozen = [event.seconds for event in plan.events if event.kind is Kind.FREEZE]
    assert min(frozen) > BATCH_TIMEOUT
    steps = [step for script in plan.scripts for step in script]
    limited = {code for step in steps if step.name == LIMITED for code in step.codes}
    assert limited == {Code.GOOD, Code.RAISES}
