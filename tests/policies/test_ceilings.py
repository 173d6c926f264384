"""Ceilings of passes: how they fall when memory is short, and rise again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.timing.ceilings import FIRST_WAIT, LONGEST_WAIT, STEP, Ceilings
from daskinfer.timing.latency import LatencyModel


def use(ceilings: Ceilings, capacity: int, start: float, seconds: float) -> int:
    """Run passes as large as may be, one a second; count those that did not fit."""
    failed = 0
    for i in range(int(seconds)):
        rows, now = ceilings.of("npu"), start + i
        if rows > capacity:
            failed += 1
            ceilings.out_of_memory("npu", rows, now)
        else:
            ceilings.fitted("npu", rows, now)
    return failed


@settings(deadline=None)
@given(
    capacity=st.integers(1, 300),
    allowed=st.none() | st.sets(st.integers(1, 256), min_size=1).map(sorted),
)
def test_it_finds_what_fits_and_seldom_tries_more(capacity, allowed):
    largest = allowed[-1] if allowed else 256
    sizes = tuple(allowed) if allowed else None
    ceilings = Ceilings(largest, sizes)
    fits = max((n for n in sizes or range(1, 257) if n <= capacity), default=None)
    failed = use(ceilings, capacity, 0.0, 100_000)
    if fits is None:
        assert ceilings.of("npu") == sizes[0]
        return
    # To the largest that fits, as near as the last step allows.
    found = ceilings.of("npu")
    if sizes:
        assert found in sizes and found >= fits
    else:
        assert found + max(int(found * STEP), 1) >= fits
    # A day of it: halvings, then tries that fail, each after twice the wait.
    tries = math.log2(LONGEST_WAIT / FIRST_WAIT) + 100_000 / LONGEST_WAIT
    assert failed <= math.log2(largest) + tries + 2


@settings(deadline=None)
@given(st.integers(1, 256), st.integers(1, 5000))
def test_a_shortage_that_has_passed_leaves_no_trace(capacity, seconds):
    ceilings = Ceilings(256)
    use(ceilings, capacity, 0.0, seconds)
    assert use(ceilings, 256, seconds, 100 * FIRST_WAIT + 2 * LONGEST_WAIT) == 0
    assert ceilings.of("npu") == 256
    assert "lowered: {}" in repr(ceilings)


@pytest.mark.parametrize("times", [1, 50])
def test_passes_that_were_under_way_teach_nothing_new(times):
    ceilings = Ceilings(64)
    for _ in range(times):
        ceilings.out_of_memory("npu", 64, 0.0)
        ceilings.out_of_memory("npu", 40, 0.0)
    assert ceilings.of("npu") == 32
    assert ceilings.of("cpu") == 64


def test_a_try_that_fails_is_taken_back_and_not_halved():
    ceilings = Ceilings(64)
    ceilings.out_of_memory("npu", 64, 0.0)
    assert not ceilings.fitted("npu", 32, FIRST_WAIT - 1)
    assert ceilings.fitted("npu", 32, FIRST_WAIT)
    assert ceilings.of("npu") == 36
    ceilings.out_of_memory("npu", 36, FIRST_WAIT)
    assert ceilings.of("npu") == 32
    assert not ceilings.fitted("npu", 32, 3 * FIRST_WAIT - 1)
    assert ceilings.fitted("npu", 32, 3 * FIRST_WAIT)


def test_a_ceiling_that_nobody_reaches_is_not_raised():
    ceilings = Ceilings(64)
    ceilings.out_of_memory("npu", 64, 0.0)
    assert not ceilings.fitted("npu", 31, 1e6)
    assert ceilings.of("npu") == 32


def test_sizes_above_a_ceiling_are_offered_again_when_it_has_risen():
    model = LatencyModel(64)
    model.seed("a", "npu", [(1, 0.01), (36, 0.04), (64, 0.07)])
    model.out_of_memory("npu", 64, 0.0)
    assert model.sizes("npu") == [1]
    before = model.version
    model.fitted("npu", 32, FIRST_WAIT)
    assert model.sizes("npu") == [1, 36]
    assert model.version > before
