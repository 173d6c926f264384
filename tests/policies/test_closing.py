"""Which workers are kept when others are closed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.closing import HELD_OUT, Closing, cover

WORKERS = st.integers(0, 8).map(lambda number: f"tcp://w{number}:1")
READY = st.dictionaries(st.sampled_from("klmnop"), st.sets(WORKERS))


@given(READY, st.sets(WORKERS))
def test_whatever_is_served_stays_so(ready, staying):
    kept = cover(ready, staying, lambda worker: 0.0)
    for workers in ready.values():
        assert not workers or workers & (kept | staying)
    assert not kept & staying
    # Nobody is kept for nothing.
    bare = [workers for workers in ready.values() if workers and not workers & staying]
    assert len(kept) <= len(bare)
    assert all(any(worker in workers for workers in bare) for worker in kept)


@given(READY)
def test_one_worker_that_serves_all_is_enough(ready):
    everywhere = {name: {*workers, "all"} for name, workers in ready.items()}
    kept = cover(everywhere, [], lambda worker: float(worker == "all"))
    assert kept == ({"all"} if ready else set())


def test_of_those_that_would_do_the_one_that_is_worth_most():
    ready = {"m": ["a", "b", "c"]}
    for best in "abc":
        assert cover(ready, [], lambda w, best=best: float(w == best)) == {best}


@given(st.lists(st.tuples(st.sets(WORKERS), st.floats(0, 1)), min_size=1))
def test_who_was_named_is_held_out_for_a_moment(history):
    closing, now = Closing(), 0.0
    for workers, passed in history:
        now += passed
        closing.name(workers, now)
        assert closing.named(now) == workers
        # Those who are not named again are not meant any more.
        until = now + HELD_OUT
        assert closing.next() == (until if workers else float("inf"))
    assert closing.named(now + 0.9 * HELD_OUT) == workers
    assert closing.named(now + HELD_OUT) == set()
