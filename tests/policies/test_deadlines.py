"""What is due when, against the simplest thing that could be right."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.deadlines import Deadlines

KEYS = st.integers(0, 5)
TIMES = st.floats(0, 10)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, TIMES),
        st.tuples(st.just("discard"), KEYS, st.none()),
        st.tuples(st.just("expired"), st.none(), TIMES),
    ),
    max_size=60,
)


@given(STEPS)
def test_it_is_a_dictionary_of_times(steps):
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, float] = {}
    for step, key, at in steps:
        if step == "set":
            deadlines.set(key, at)
            model[key] = at
        elif step == "discard":
            deadlines.discard(key)
            model.pop(key, None)
        else:
            due = deadlines.expired(at)
            assert sorted(due) == sorted(k for k, t in model.items() if t <= at)
            assert [model[k] for k in due] == sorted(model[k] for k in due)
            for k in due:
                del model[k]
        assert len(deadlines) == len(model)
        assert deadlines.next() == min(model.values(), default=math.inf)
        assert all((k in deadlines) == (k in model) for k in range(6))


# Times in order stand in a row; those before one that is set already do not.
LATER = pytest.mark.parametrize("later", [[], [10.0**9]], ids=["in order", "before"])


@LATER
def test_what_is_discarded_leaves_nothing_behind(later):
    deadlines: Deadlines[int] = Deadlines()
    for at in later:
        deadlines.set(-2, at)
    deadlines.set(-1, 0.0)
    for i in range(100_000):
        deadlines.set(i, 1.0 + i)
        deadlines.discard(i)
        assert len(deadlines._heap) + len(deadlines._row) < 100
    assert deadlines.expired(10.0**8) == [-1]


@LATER
def test_a_time_that_is_moved_again_and_again_is_kept_once(later):
    deadlines: Deadlines[str] = Deadlines()
    for at in later:
        deadlines.set("later", at)
    for i in range(10_000):
        deadlines.set("k", float(i))
    assert len(deadlines._heap) + len(deadlines._row) < 100
    assert deadlines.expired(9998.0) == []
    assert deadlines.expired(9999.0) == ["k"]


def test_keys_that_cannot_be_compared_may_be_due_together():
    deadlines: Deadlines[object] = Deadlines()
    for key in ("text", 1, ("a", 1)):
        deadlines.set(key, 1.0)
    assert deadlines.expired(1.0) == ["text", 1, ("a", 1)]
