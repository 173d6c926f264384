"""Models that wait off their device: which stay, which go, and for how much memory."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from daskinfer.worker.parking import Parking, Which


class Function:
    """What a model calls; in a cycle with itself if it is told so."""

    def __init__(self, is_cyclic: bool = False) -> None:
        self.itself = self if is_cyclic else None


class Parked:
    """As much of a model as is looked at."""

    def __init__(self, nbytes: int, digest: str = "d", is_cyclic: bool = False) -> None:
        self.nbytes = nbytes
        self.digest = digest
        self.function = Function(is_cyclic)


class Lot:
    """A parking place, its budget, and what had to leave it."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.evicted: list[str] = []
        self.parking = Parking(lambda: self.budget, self._note)

    def _note(self, which: Which) -> None:
        self.evicted.append(which[0])

    def put(self, name: str, nbytes: int = 10, **kwargs: Any) -> bool:
        return self.parking.put((name, "1"), Parked(nbytes, **kwargs))  # type: ignore[arg-type]

    def names(self) -> str:
        return "".join(sorted(self.parking.names()))


@pytest.fixture
def lot() -> Lot:
    return Lot(30)


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_what_was_parked_longest_ago_makes_room(lot):
    assert all(lot.put(name) for name in "abcd")
    assert (lot.names(), lot.evicted) == ("bcd", ["a"])
    # As large as two of them.
    assert lot.put("e", 20)
    assert (lot.names(), lot.evicted) == ("de", ["a", "b", "c"])
    assert (len(lot.parking), lot.parking.nbytes) == (2, 30)


def test_what_was_wanted_and_came_back_is_the_last_to_go(lot):
    for name in "abc":
        lot.put(name)
    assert lot.parking.take(("a", "1"), "d").nbytes == 10
    assert lot.names() == "bc"
    lot.put("a")
    lot.put("d")
    assert (lot.names(), lot.evicted) == ("acd", ["b"])


def test_what_is_larger_than_the_budget_is_not_kept_and_evicts_nobody(lot):
    lot.put("a")
    assert not lot.put("large", 31)
    assert not lot.parking.make_room(31)
    assert (lot.names(), lot.evicted) == ("a", [])


def test_a_model_that_is_put_again_replaces_itself(lot):
    lot.put("a", 20)
    lot.put("b")
    assert lot.put("a")
    assert (lot.names(), lot.parking.nbytes, lot.evicted) == ("ab", 20, [])


def test_room_is_made_before_it_is_needed(lot):
    for name in "abc":
        lot.put(name)
    assert lot.parking.make_room(11)
    assert (lot.names(), lot.evicted) == ("c", ["a", "b"])


def test_a_budget_that_shrinks(lot):
    for name in "abc":
        lot.put(name)
    lot.budget = 19
    lot.parking.fit()
    assert (lot.names(), lot.evicted) == ("c", ["a", "b"])
    # Models on the CPU may take more than all.
    lot.budget = -5
    lot.parking.fit()
    assert (lot.names(), lot.parking.nbytes) == ("", 0)
    assert not lot.put("d")


def test_without_a_budget_all_are_kept():
    lot = Lot(float("inf"))
    assert all(lot.put(name, 2**40) for name in "abc")
    assert (lot.names(), lot.evicted) == ("abc", [])


def test_memory_is_given_back_when_it_is_asked_for(lot):
    for name in "abc":
        lot.put(name)
    assert lot.parking.shrink(0) == 0
    assert lot.parking.shrink(11) == 20
    assert (lot.names(), lot.evicted) == ("c", ["a", "b"])
    assert lot.parking.shrink(1000) == 10
    assert lot.parking.shrink(1000) == 0
    assert lot.names() == ""


def test_another_digest_is_another_model(lot):
    lot.put("a", digest="old")
    assert lot.parking.take(("a", "1"), "new") is None
    assert (lot.names(), lot.evicted) == ("", [])
    assert lot.parking.take(("a", "1"), "old") is None


def test_what_is_dropped_on_purpose_is_not_evicted(lot):
    for name in "ab":
        lot.put(name)
    assert lot.parking.drop(("a", "1")).nbytes == 10
    assert lot.parking.drop(("a", "1")) is None
    assert ("b", "1") in lot.parking and ("b", "2") not in lot.parking
    lot.parking.clear()
    assert (lot.names(), lot.parking.nbytes, lot.evicted) == ("", 0, [])


def test_statistics(lot):
    assert lot.parking.stats() == dict.fromkeys(
        ("entries", "bytes", "hits", "misses", "evictions"), 0
    )
    for name in "abcd":
        lot.put(name)
    lot.parking.take(("b", "1"), "d")
    lot.parking.take(("a", "1"), "d")
    lot.parking.take(("nobody", "1"), "d")
    lot.parking.drop(("c", "1"))
    assert lot.parking.stats() == {
        "entries": 1,
        "bytes": 10,
        "hits": 1,
        "misses": 2,
        "evictions": 1,
    }


@pytest.mark.parametrize("is_cyclic", [False, True])
def test_what_is_evicted_is_freed_at_once(lot, no_gc, is_cyclic):
    model = Parked(30, is_cyclic=is_cyclic)
    function = weakref.ref(model.function)
    lot.parking.put(("a", "1"), model)
    del model
    assert function() is not None
    lot.put("b")
    assert function() is None


def test_many_threads_at_once():
    lot = Lot(100)
    taken = [0] * 4

    def use(place: int) -> None:
        for i in range(500):
            which = (f"m{i % 7}", str(place))
            lot.parking.put(which, Parked(10 + i % 3))  # type: ignore[arg-type]
            if i % 5 == 0:
                lot.parking.shrink(15)
            taken[place] += lot.parking.take(which, "d") is not None

    threads = [threading.Thread(target=use, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = lot.parking.stats()
    assert stats["hits"] == sum(taken) > 0
    assert sum(taken) + stats["misses"] == 2000
    # Each was put once, and has been taken or evicted since.
    assert stats["hits"] + stats["evictions"] + stats["entries"] == 2000
    assert stats["bytes"] == lot.parking.nbytes <= 100
