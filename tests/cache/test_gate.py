"""Caches that are not worth asking."""

from __future__ import annotations

from daskinfer.cache.gate import FIRST_REST, LEAST_RATE, LONGEST_REST, WINDOW, HitGate


def test_it_closes_when_a_window_had_next_to_no_hits() -> None:
    gate = HitGate()
    for _ in range(WINDOW - 1):
        gate.looked_up(1, 0, 5.0)
        assert gate.is_open(5.0)
    gate.looked_up(1, 0, 5.0)
    assert not gate.is_open(5.0)
    assert not gate.is_open(5.0 + FIRST_REST - 0.01)
    assert gate.is_open(5.0 + FIRST_REST)


def test_it_stays_open_while_hits_pay() -> None:
    gate = HitGate()
    for _ in range(10):
        gate.looked_up(WINDOW, int(LEAST_RATE * WINDOW), 0.0)
        assert gate.is_open(0.0)


def test_it_rests_longer_each_time_and_starts_anew_after_a_good_window() -> None:
    gate, now, rests = HitGate(), 0.0, []
    for _ in range(7):
        gate.looked_up(WINDOW, 0, now)
        began = now
        while not gate.is_open(now):
            now += 1.0
        rests.append(now - began)
    assert rests == [30.0, 60.0, 120.0, 240.0, 480.0, LONGEST_REST, LONGEST_REST]
    gate.looked_up(WINDOW, WINDOW, now)
    gate.looked_up(WINDOW, 0, now)
    assert gate.is_open(now + FIRST_REST) and not gate.is_open(now + FIRST_REST - 1)


def test_what_was_under_way_when_it_closed_is_not_held_against_the_next_window() -> (
    None
):
    gate = HitGate()
    gate.looked_up(WINDOW, 0, 0.0)
    gate.looked_up(WINDOW, 0, 1.0)
    gate.looked_up(1, 0, FIRST_REST)
    assert gate.is_open(FIRST_REST)
