"""What is kept of a request's life is little, whatever happens to it."""

from __future__ import annotations

import sys

from scheduler_plugins.trail import (
    CANCELLED,
    INTERRUPTED,
    QUEUED,
    SENT,
    SUBMITTED,
    Attempt,
    Past,
    Trail,
)


def attempt(number: int) -> Attempt:
    return Attempt(f"m-{number}", "1", "tcp://w:1", 1, 1, float(number))


def test_a_long_life_is_cut_in_the_middle() -> None:
    trail = Trail()
    trail.note(0.0, SUBMITTED)
    for number in range(1000):
        trail.note(number, QUEUED, "1")
        trail.note(number, SENT, attempt(number))
        trail.note(number, INTERRUPTED, f"by {number}")
    trail.note(1000.0, CANCELLED, "released")
    events = trail.events()
    assert len(events) == 64 and trail.is_cut
    assert events[0] == (0.0, SUBMITTED, "")
    assert events[-1] == (1000.0, CANCELLED, "released")
    # Where it was sent last is what is asked for most.
    assert [a.batch_id for a in trail.attempts()][-3:] == ["m-997", "m-998", "m-999"]
    assert [a.batch_id for a in trail.attempts()][:2] == ["m-0", "m-1"]


def test_being_moved_about_in_the_queue_is_no_event() -> None:
    trail = Trail()
    for now in range(100):
        trail.note(now, QUEUED, "1")
    trail.note(100, QUEUED, "2")
    assert trail.events() == [(0, QUEUED, "1"), (100, QUEUED, "2")]
    assert not trail.is_cut


def test_the_latest_of_a_key_is_found() -> None:
    past, first, second = Past(), Trail(), Trail()
    past.add("k", "m", first)
    past.add("k", "m", second)
    found = past.find("k")
    assert found is not None and found[1] is second


def test_a_usual_request_takes_little() -> None:
    trail = Trail()
    trail.note(0.0, SUBMITTED)
    trail.note(0.1, QUEUED, "1")
    trail.note(0.2, SENT, attempt(1))
    trail.note(0.3, "answered", "computed")
    # Besides texts and attempts, which many share.
    times = [at for at, _, _ in trail.events()]
    assert sum(map(sys.getsizeof, (trail, *times))) < 350
