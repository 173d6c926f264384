"""Steps are counted, not requests: where the next one should go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.pace import FIRST_SLOTS, Pace


def paced(**workers: tuple[int, float]) -> Pace:
    pace = Pace()
    for address, about in workers.items():
        pace.told(address, *about)
    return pace


def test_fewest_requests_among_equals() -> None:
    pace = paced(a=(16, 0.01), b=(16, 0.01))
    assert pace.best({"a": 5, "b": 3}) == ["b"]
    assert pace.best({"a": 3, "b": 3}) == ["a", "b"]
    assert pace.best({}) == []


def test_fast_one_with_many_before_slow_one_with_none() -> None:
    pace = paced(fast=(16, 0.01), slow=(16, 0.05))
    assert pace.best({"fast": 15, "slow": 0}) == ["fast"]


def test_waiting_for_the_fast_one_pays_or_not() -> None:
    # Of 16 requests one ends soon, and ten times slower is worse than that.
    pace = paced(fast=(16, 0.01), slow=(16, 0.1))
    assert pace.best({"fast": pace.room("fast"), "slow": 0}) == []
    # Where two thirds more time is all that it costs, waiting for one of two is worse.
    pace = paced(fast=(1, 0.01), slow=(1, 0.0167))
    assert pace.best({"fast": pace.room("fast"), "slow": 0}) == ["slow"]


def test_place_is_refilled_from_what_waits_on_the_worker() -> None:
    pace = paced(a=(16, 0.01), b=(1, 0.01))
    assert (pace.room("a"), pace.room("b"), pace.room("new")) == (18, 2, 9)
    assert pace.slots("new") == FIRST_SLOTS


def test_steps_are_learned_and_what_waits_is_counted_in_them() -> None:
    pace = paced(a=(10, 0.01))
    for _ in range(100):
        pace.ended(200)
    assert round(pace.steps) == 200
    assert round(pace.waiting_seconds(5, ["a"]), 6) == round(5 * 200 * 0.01 / 10, 6)
    assert round(pace.finish("a", 0), 6) == 2.0
    assert pace.finish("a", 10) > pace.finish("a", 9)


def test_what_is_gone_is_forgotten() -> None:
    pace = paced(a=(64, 5.0), b=(4, 0.01))
    pace.forget("a")
    assert pace.slots("a") == FIRST_SLOTS
    assert pace.seconds("a") == 0.01


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.integers(1, 64), st.floats(1e-4, 10.0), st.integers(0, 80)),
        min_size=1,
    )
)
def test_someone_is_chosen_where_all_have_room(workers: dict[str, tuple]) -> None:
    pace = paced(**{name: about[:2] for name, about in workers.items()})
    live = {name: about[2] for name, about in workers.items()}
    best = pace.best(live)
    assert all(live[name] < pace.room(name) for name in best)
    if all(live[name] < pace.slots(name) for name in live):
        assert best
