from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from daskinfer.cache import TTL
from tests.cache.helpers import FakeClock


def test_reading_and_setting_start_the_time_anew() -> None:
    clock = FakeClock()
    d: TTL[str, int] = TTL({}, 10.0, clock.monotonic)
    d["a"], d["b"] = 1, 2
    clock.advance(6)
    assert d["a"] == 1
    clock.advance(4)
    assert d.overdue(clock.now) == "b"
    assert not d.outlived("a", clock.now)
    assert "b" in d
    assert len(d) == 2
    del d["b"]
    assert d.overdue(clock.now) is None
    assert d.next_deadline() == 1016.0


def test_age_counts_from_birth_in_whatever_order_elements_come() -> None:
    clock = FakeClock()
    d: TTL[str, float] = TTL(
        {"first": 5.0}, 10.0, clock.monotonic, born=lambda _, value: value
    )
    d["young"], d["old"] = 3.0, 1.0
    assert d["old"] == 1.0
    assert d.next_deadline() == 11.0
    assert d.overdue(12.0) == "old"
    del d["old"]
    assert d.overdue(12.0) is None
    assert d.overdue(13.0) == "young"
    d["young"] = 100.0
    assert d.next_deadline() == 15.0
    d["young"] = 2.0
    assert d.next_deadline() == 12.0


def test_without_a_limit_nothing_is_overdue() -> None:
    d: TTL[str, int] = TTL({}, math.inf, lambda: 0.0)
    d["a"] = 1
    assert d.next_deadline() is None
    assert d.overdue(1e12) is None
    assert not d.outlived("a", 1e12)


def test_what_was_taken_away_leaves_nothing_behind() -> None:
    d: TTL[int, int] = TTL({}, 10.0, lambda: 0.0)
    for key in range(10_000):
        d[key] = key
        del d[key]
    assert len(d._heap) < 200
    assert not d._deadlines


steps = st.lists(
    st.tuples(st.sampled_from("srdt"), st.integers(0, 4), st.integers(1, 5))
)


@given(steps)
def test_it_agrees_with_a_plain_list_of_deadlines(
    steps: list[tuple[str, int, int]],
) -> None:
    clock = FakeClock()
    d: TTL[int, int] = TTL({}, 10.0, clock.monotonic)
    deadlines: dict[int, float] = {}
    for step, key, seconds in steps:
        if step == "t":
            clock.advance(seconds)
        elif step == "s":
            d[key] = seconds
            deadlines[key] = clock.now + 10
        elif step == "r" and key in d:
            assert d[key]
            deadlines[key] = clock.now + 10
        elif step == "d" and key in d:
            del d[key]
            del deadlines[key]
        assert d.next_deadline() == min(deadlines.values(), default=None)
        overdue = d.overdue(clock.now)
        late = {k for k, when in deadlines.items() if when <= clock.now}
        assert (overdue in late) if late else overdue is None
        assert {k for k in d if d.outlived(k, clock.now)} == late
