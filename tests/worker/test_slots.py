"""Who starts, who steps, and how many there are: decided without a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.worker.slots import FIRST_ROWS, SHORTAGE_SECONDS, Candidate, Slots


def waiting(*rows: int, kind: Any = "text") -> list[Candidate]:
    return [Candidate(place, n, kind) for place, n in enumerate(rows)]


def keys(chosen: list[Candidate]) -> list[Any]:
    return [candidate.key for candidate in chosen]


def learned(slots: Slots, seconds: Callable[[int], float], until: int = 40) -> Slots:
    """Let as many rows step as shall, as if there were always enough."""
    for _ in range(until):
        rows = slots.limit
        slots.stepped(rows, seconds(rows), now=0.0)
    return slots


def test_all_step_together_where_a_step_takes_as_long_for_all() -> None:
    assert learned(Slots(64), lambda rows: 0.01).limit == 64


def test_no_more_step_together_than_pays() -> None:
    # Up to 8 rows a step takes the same, and then in proportion.
    slots = learned(Slots(64), lambda rows: 0.001 * max(rows, 8))
    assert slots.limit == 8


def test_beyond_the_best_size_nothing_is_tried() -> None:
    slots = learned(Slots(64), lambda rows: 0.001 * rows * (1 if rows <= 16 else 2))
    assert slots.limit <= 16


def test_steps_are_kept_as_short_as_they_shall_be() -> None:
    slots = learned(Slots(64, target=0.02), lambda rows: 0.005 + 0.001 * rows)
    assert slots.limit <= 16


def test_sizes_that_are_allowed_are_tried_one_after_the_other() -> None:
    tried = []

    def seconds(rows: int) -> float:
        tried.append(rows)
        return 0.01

    slots = learned(Slots(32, allowed=(4, 16, 32)), seconds)
    assert slots.limit == 32
    assert list(dict.fromkeys(tried)) == [FIRST_ROWS, 32]
    assert [slots.padded(rows) for rows in (1, 5, 17)] == [4, 16, 32]


def test_model_with_less_room_than_a_batch_has() -> None:
    slots = learned(Slots(64, allowed=(4, 16, 64), room=6), lambda rows: 0.01)
    assert slots.limit == slots.max_rows == 6
    assert slots.refusal(6) is None
    assert "no more than 6 rows" in str(slots.refusal(7))


def test_all_of_one_kind_start_together_while_nobody_runs() -> None:
    slots = Slots(64)
    some = [
        *waiting(1, 1, 1),
        Candidate("other", 1, "image"),
        Candidate("d", 1, "text"),
    ]
    assert keys(slots.starting(some, 0, 0, 0.0, now=0.0)) == [0, 1, 2, "d"]
    assert keys(slots.starting(waiting(2, 1, kind=None), 0, 0, 0.0, 0.0)) == [0]


def ready(start: float, step: float = 0.010) -> Slots:
    """Slots that know what a start and a step take, whatever their rows."""
    slots = learned(Slots(64), lambda rows: step)
    for rows in (1, 1, 2, 2, 4, 4, 8, 8):
        slots.started("text", rows, start * rows)
    return slots


def test_starts_take_no_longer_than_a_step_while_others_run() -> None:
    slots = ready(start=0.002)
    chosen = slots.starting(waiting(*[1] * 20), 10, 10, 0.0, now=0.0)
    assert len(chosen) == 5
    assert not slots.starting(waiting(1, 1), 10, 10, 0.0095, now=0.0)
    assert len(slots.starting(waiting(*[1] * 9), 10, 10, 0.006, now=0.0)) == 2


def test_one_starts_before_each_step_however_long_it_takes() -> None:
    slots = ready(start=0.5)
    assert keys(slots.starting(waiting(1, 1), 10, 10, 0.0, now=0.0)) == [0]
    assert not slots.starting(waiting(1, 1), 10, 10, 0.5, now=0.0)


def test_kind_that_is_new_is_tried_with_one() -> None:
    slots = ready(start=0.001)
    some = waiting(1, 1, kind="new")
    assert keys(slots.starting(some, 1, 1, 0.0, now=0.0)) == [0]
    assert keys(slots.starting(some, 1, 1, 0.001, now=0.0)) == [0]
    assert not slots.starting(some, 1, 1, 0.010, now=0.0)


def test_large_one_is_not_overtaken_for_ever() -> None:
    slots = learned(Slots(64), lambda rows: 0.001 * max(rows, 8))
    some = [Candidate("large", 20, "text"), *waiting(1, 1)]
    assert not slots.starting(some, 1, 1, 0.0, now=0.0)
    assert keys(slots.starting(some, 0, 0, 0.0, now=0.0)) == ["large"]
    # Those that are held, and not read from, are in nobody's way.
    assert keys(slots.starting(some, 0, 3, 0.0, now=0.0)) == ["large"]


def test_no_more_is_held_than_there_is_room_for() -> None:
    slots = Slots(4, room=4)
    assert not slots.starting(waiting(1), 0, 4, 0.0, now=0.0)
    assert slots.is_full(1, 4, now=0.0) and not slots.is_full(1, 3, now=0.0)
    assert keys(slots.starting(waiting(1, 1), 3, 3, 0.0, now=0.0)) == [0]


def test_shortage_of_memory_is_forgotten_after_a_while() -> None:
    slots = Slots(64)
    slots.start_did_not_fit(3, now=0.0)
    assert not slots.starting(waiting(1), 0, 3, 0.0, now=1.0)
    assert keys(slots.starting(waiting(1), 2, 2, 0.0, now=1.0)) == [0]
    assert keys(slots.starting(waiting(1), 3, 3, 0.0, now=SHORTAGE_SECONDS)) == [0]


def test_passes_shrink_where_they_do_not_fit_and_grow_again() -> None:
    slots = Slots(8)
    slots.step_did_not_fit(8, now=0.0)
    assert slots.ceiling == 4
    parts = list(slots.passes(waiting(*[1] * 8)))
    assert [keys(part) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for second in range(100):
        slots.stepped(slots.ceiling, 0.01, now=60.0 * second)
    assert slots.ceiling == 8


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["a", "b", None]))),
    st.integers(4, 16),
)
def test_each_steps_once_with_its_own_kind(some: list[Any], ceiling: int) -> None:
    live = [Candidate(place, *about) for place, about in enumerate(some)]
    parts = list(Slots(ceiling).passes(live))
    assert sorted(key for part in parts for key in keys(part)) == list(range(len(live)))
    for part in parts:
        assert sum(candidate.rows for candidate in part) <= ceiling
        assert len({candidate.kind for candidate in part}) == 1
        assert len(part) == 1 or part[0].kind is not None


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_someone_always_starts_where_nobody_is(rows: int) -> None:
    slots = learned(Slots(64), lambda n: 0.001 * n)
    slots.start_did_not_fit(0, now=0.0)
    assert keys(slots.starting(waiting(rows, 1), 0, 0, 0.0, now=0.0))[0] == 0


@given(
    start=st.floats(1e-4, 0.05),
    per_row=st.floats(0, 0.01),
    step=st.floats(1e-3, 0.05),
    arrivals=st.lists(st.integers(0, 30), max_size=40),
)
def test_nobody_waits_for_more_than_a_step_or_one_start(
    start: float, per_row: float, step: float, arrivals: list[int]
) -> None:
    slots = learned(Slots(64), lambda rows: step)
    for rows in (1, 1):
        slots.started("text", rows, start + per_row * rows)
    queue: list[Candidate] = []
    running = 1
    for turn in range(60):
        queue += [
            Candidate(key, 1, "text") for key, at in enumerate(arrivals) if at == turn
        ]
        spent = 0.0
        while chosen := slots.starting(queue, running, running, spent, now=0.0):
            queue = [candidate for candidate in queue if candidate not in chosen]
            running += len(chosen)
            seconds = start + per_row * len(chosen)
            slots.started("text", len(chosen), seconds)
            spent += seconds
        # What starts of more rows take is foreseen by what fewer have taken.
        assert spent <= max(step, start + per_row) * 1.25
        slots.stepped(running, step, now=0.0)
    assert not queue


def test_size_that_was_measured_in_a_bad_moment_is_tried_again() -> None:
    slots = Slots(64)
    for _ in range(3):
        slots.stepped(8, 0.010, now=0.0)
        slots.stepped(16, 0.100, now=0.0)
    assert slots.limit == 8
    learned(slots, lambda rows: 0.010, until=20_000)
    assert slots.limit == 64


def test_size_that_is_no_better_is_tried_ever_more_rarely() -> None:
    slots = learned(Slots(64), lambda rows: 0.001 * max(rows, 8))
    tried = []
    for step in range(20_000):
        rows = slots.limit
        if rows > 8:
            tried.append(step)
        slots.stepped(rows, 0.001 * max(rows, 8), now=0.0)
    assert slots.limit == 8
    assert 3 <= len(tried) <= 20
