from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.room import Place, Space, Tenant, find_place, never_fits, soonest

TURN = 5.0
NOW = 100.0


def tenant(name="m", nbytes=40, **about):
    about = {"since": 0.0, "used": 50.0} | about
    return Tenant((name, "1"), nbytes, **about)


def find(*spaces, nbytes=40, urgent=True, now=NOW):
    return find_place(spaces, nbytes, now, TURN, urgent=urgent)


def leaving(place):
    return [t.which[0] for t in place.leaving]


def test_it_goes_where_there_is_most_room():
    full = Space("a", 100, (tenant("x"), tenant("y")))
    roomy = Space("b", 100, (tenant("x"),))
    empty = Space("c", 100)
    assert find(full, roomy, empty) == Place("c")
    assert find(full, roomy) == Place("b")


def test_a_worker_without_a_limit_has_room_always():
    assert find(Space("a", math.inf, (tenant(nbytes=10**12),))) == Place("a")


def test_the_least_recently_used_leaves():
    space = Space("a", 100, (tenant("x", used=60.0), tenant("y", used=20.0)))
    assert leaving(find(space)) == ["y"]


def test_room_is_preferred_to_making_some_and_the_idle_to_the_busy():
    busy = Space("a", 50, (tenant("x", wanted_until=math.inf, since=0.0),))
    idle = Space("b", 50, (tenant("y", used=99.9),))
    free = Space("c", 50)
    assert find(busy, idle).address == "b"
    assert find(busy, idle, free).address == "c"


def test_of_idle_ones_the_longest_unused_leaves_whichever_worker_it_is_on():
    spaces = Space("a", 50, (tenant("x", used=60.0),)), Space("b", 50, (tenant("y"),))
    assert find(*spaces).address == "b"


def test_one_that_was_used_just_now_is_wanted_for_a_while():
    space = Space("a", 50, (tenant("x", since=98.0, wanted_until=100.5),))
    assert find(space) == 100.5
    assert leaving(find(space, now=100.5)) == ["x"]


def test_it_comes_back_where_it_is_parked():
    full = Space("a", 50, (tenant("x"),), has_parked=True)
    assert find(Space("b", 50), full).address == "a"
    busy = Space("a", 50, (tenant("x", wanted_until=math.inf),), has_parked=True)
    assert find(Space("b", 50), busy).address == "b"


def test_a_busy_one_leaves_after_its_turn_only():
    space = Space("a", 50, (tenant("x", wanted_until=math.inf, since=98.0),))
    assert find(space) == 98.0 + TURN
    assert leaving(find(space, now=98.0 + TURN)) == ["x"]


def test_where_it_is_not_urgent_nobody_leaves_that_is_in_use_or_was_just_now():
    busy = Space("a", 50, (tenant("x", wanted_until=math.inf),))
    recent = Space("b", 50, (tenant("y", used=97.0),))
    assert find(busy, recent, urgent=False) == 97.0 + TURN
    assert leaving(find(busy, recent, urgent=False, now=102.0)) == ["y"]


def test_what_is_fixed_stays():
    space = Space("a", 50, (tenant("x", is_fixed=True),))
    assert find(space) == math.inf
    assert never_fits(space, 40)
    assert not never_fits(space, 10)
    assert never_fits(Space("a", 50), 51)


def test_small_ones_that_would_not_help_stay():
    small = tenant("small", nbytes=5, used=1.0)
    large = tenant("large", nbytes=60, used=2.0)
    assert leaving(find(Space("a", 70, (small, large)))) == ["large"]


def test_what_is_being_loaded_stays():
    loading = tenant("x", wanted_until=math.inf, since=math.inf, used=math.inf)
    assert find(Space("a", 50, (loading,))) == math.inf


tenants = st.builds(
    Tenant,
    st.tuples(st.text(min_size=1, max_size=3), st.just("1")),
    st.integers(0, 60),
    since=st.floats(0, 110),
    used=st.floats(0, 110),
    wanted_until=st.sampled_from([-math.inf, math.inf]) | st.floats(0, 120),
    is_fixed=st.booleans(),
)
spaces = st.builds(
    Space,
    st.sampled_from("abcd"),
    st.integers(0, 200),
    st.lists(tenants, max_size=6).map(tuple),
    st.booleans(),
)


@given(
    st.lists(spaces, max_size=4, unique_by=lambda space: space.address),
    st.integers(0, 120),
    st.booleans(),
)
def test_whatever_workers_have_a_place_is_enough_and_costs_nobody_more_than_it_must(
    spaces, nbytes, urgent
):
    found = find(*spaces, nbytes=nbytes, urgent=urgent)
    if not isinstance(found, Place):
        assert found > NOW
        assert not any(space.free >= nbytes for space in spaces)
        return
    (space,) = [space for space in spaces if space.address == found.address]
    gone = sum(t.nbytes for t in found.leaving)
    assert space.free + gone >= nbytes
    # None of them leaves for nothing.
    for one in found.leaving:
        assert one in space.tenants
        assert space.free + gone - one.nbytes < nbytes
        assert not one.is_fixed
        if one.wanted_until > NOW:
            assert urgent
            assert one.since + TURN <= NOW
        if not urgent:
            assert one.used + TURN <= NOW
    if found.leaving and not space.has_parked:
        assert not any(other.free >= nbytes for other in spaces)
    if any(one.wanted_until > NOW for one in found.leaving):
        for other in spaces:
            idle = sum(
                t.nbytes
                for t in other.tenants
                if t.wanted_until <= NOW and not t.is_fixed
            )
            assert other.free + idle < nbytes


@given(spaces, st.integers(0, 200))
def test_a_model_never_fits_where_it_would_not_if_all_left_that_can(space, nbytes):
    idle = [
        Tenant(t.which, t.nbytes, 0.0, 0.0, is_fixed=t.is_fixed) for t in space.tenants
    ]
    found = find(Space(space.address, space.nbytes, tuple(idle)), nbytes=nbytes)
    assert isinstance(found, Place) is not never_fits(space, nbytes)


def claimed(*spaces, nbytes=80):
    return soonest(spaces, nbytes, TURN)


def test_it_waits_where_all_that_must_go_may_go_first():
    one = [tenant(since=97.0, wanted_until=math.inf) for _ in range(2)]
    early = tenant(since=90.0, wanted_until=math.inf)
    late = tenant(since=99.0, wanted_until=math.inf)
    spaces = [Space("a", 80, (early, late)), Space("b", 80, tuple(one))]
    assert claimed(*spaces) == "b"
    # Where one is enough, only that counts.
    assert claimed(*spaces, nbytes=40) == "a"


def test_it_waits_for_those_that_are_being_loaded_only_where_it_must():
    loading = tenant(since=math.inf, wanted_until=math.inf)
    busy = tenant(since=99.0, wanted_until=math.inf)
    spaces = [Space("a", 80, (busy, loading)), Space("b", 80, (busy, busy))]
    assert claimed(*spaces) == "b"
    assert claimed(spaces[0]) == "a"


def test_it_waits_nowhere_where_it_never_fits():
    fixed = Space("a", 80, (tenant(is_fixed=True), tenant()))
    small = Space("b", 70)
    assert claimed(fixed, small) is None
    assert claimed() is None
