"""Who may look for room on a worker that another one waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scheduler_plugins.claims import Claims

A, B = ("tcp://a:1", "cpu"), ("tcp://b:1", "cpu")


def line(name: str, served: float) -> Any:
    return SimpleNamespace(name=name, version="1", served=served)


def test_who_was_given_more_device_time_does_not_come_before() -> None:
    claims, first = Claims(), line("first", 1.0)
    claims.claim(first, A, until=5.0)
    assert claims.admits(first, A, 4.0)
    assert claims.admits(line("less", 0.9), A, 4.0)
    assert not claims.admits(line("as much", 1.0), A, 4.0)
    assert not claims.admits(line("more", 1.1), A, 4.0)
    assert claims.admits(line("more", 1.1), B, 4.0)


def test_what_is_not_claimed_again_in_time_is_free() -> None:
    claims, first, other = Claims(), line("first", 1.0), line("other", 2.0)
    claims.claim(first, A, until=5.0)
    claims.claim(first, A, until=6.0)
    assert not claims.admits(other, A, 5.0)
    assert claims.admits(other, A, 6.0)


def test_who_has_room_claims_nothing_more() -> None:
    claims, first, other = Claims(), line("first", 1.0), line("other", 2.0)
    claims.claim(first, A, until=5.0)
    claims.claim(other, B, until=5.0)
    claims.drop(first)
    assert claims.admits(other, A, 4.0)
    assert not claims.admits(line("third", 3.0), B, 4.0)
