"""What imap decides: which results are due, how many requests there may be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer import status
from daskinfer.imap.pace import Backoff, Capacity, Inputs, Interval, bounds, held
from daskinfer.imap.window import Bounds, Outcome, Window

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "answer", "refuse", "again", "take", "bound"]),
        st.integers(0, 1000),
    ),
    max_size=150,
)


class Played:
    """A window, and what is known of it by simpler means."""

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered
        self.window = Window(ordered)
        self.on_their_way: list[int] = []
        self.refused: list[int] = []
        self.answers: list[int] = []
        self.taken: list[int] = []
        self.sent = 0

    def play(self, step: str, number: int) -> None:
        window = self.window
        if step == "bound":
            window.bounds = Bounds(number % 7, number % 11)
        elif step == "send" and window.room:
            assert window.send() == self.sent
            self.on_their_way.append(self.sent)
            self.sent += 1
            # Whatever was there before the bounds changed, no more is added.
            assert len(self.on_their_way) <= window.bounds.in_flight
            assert self.sent - len(self.taken) <= window.bounds.kept
        elif step == "answer" and self.on_their_way:
            place = self.on_their_way.pop(number % len(self.on_their_way))
            window.answered(Outcome(place, f"result {place}"))
            self.answers.append(place)
        elif step == "refuse" and self.on_their_way:
            place = self.on_their_way.pop(number % len(self.on_their_way))
            window.refused(place)
            self.refused.append(place)
        elif step == "again":
            places = window.again(number % 4)
            assert places == self.refused[: number % 4]
            del self.refused[: number % 4]
            self.on_their_way += places
        elif step == "take":
            self.take()

    def take(self) -> bool:
        due = self.window.take()
        if due is not None:
            assert due.value == f"result {due.place}"
            self.taken.append(due.place)
        return due is not None


@settings(max_examples=200)
@given(ordered=st.booleans(), steps=STEPS)
def test_every_result_is_given_once_and_in_order(
    ordered: bool, steps: list[tuple[str, int]]
) -> None:
    played = Played(ordered)
    window = played.window
    for step in steps:
        played.play(*step)
        assert window.unanswered == len(played.on_their_way)
        assert window.has_refused == bool(played.refused)
        if played.refused:
            assert not window.room
        assert not window.is_over
    # The rest: all are answered in the end.
    window.end()
    assert window.room == 0
    played.on_their_way += window.again(len(played.refused))
    for place in reversed(played.on_their_way):
        window.answered(Outcome(place, f"result {place}"))
        played.answers.append(place)
    while played.take():
        pass
    assert window.is_over and window.error is None
    expected = range(played.sent) if ordered else played.answers
    assert played.taken == list(expected)


@settings(max_examples=200)
@given(in_flight=st.integers(1, 100), kept=st.integers(1, 100), order=st.randoms())
def test_a_reader_that_waits_is_woken(in_flight: int, kept: int, order: Any) -> None:
    """Once everything is answered and taken it must be worth filling again."""
    window = Window(ordered=True)
    window.bounds = Bounds(in_flight, kept)
    for _ in range(3):
        places = [window.send() for _ in range(window.room)]
        assert len(places) == min(in_flight, kept) and not window.is_low
        order.shuffle(places)
        for place in places:
            window.answered(Outcome(place))
        while window.take() is not None:
            pass
        assert window.is_low


def test_few_results_wake_no_reader() -> None:
    window = Window(ordered=False)
    window.bounds = Bounds(8, 8)
    for _ in range(8):
        window.send()
    woken = []
    for place in range(8):
        window.answered(Outcome(place))
        window.take()
        woken.append(window.is_low)
    assert woken == [False] + [True] * 7


def test_what_was_sent_before_the_inputs_failed_is_due_first() -> None:
    window = Window(ordered=True)
    window.bounds = Bounds(2, 2)
    window.send()
    error = ValueError("no more")
    window.end(error)
    assert not window.is_over and not window.room
    window.answered(Outcome(0, "a"))
    assert not window.is_over
    assert window.take() == Outcome(0, "a")
    assert window.is_over and window.error is error


def test_what_is_here_before_all_fails_is_due_first() -> None:
    window = Window(ordered=True)
    window.bounds = Bounds(4, 4)
    for _ in range(4):
        window.send()
    window.answered(Outcome(0, "a"))
    window.answered(Outcome(2, "c"))
    window.end()
    window.fail(ConnectionError("gone"))
    assert window.take() == Outcome(0, "a")
    # What comes in between will never be there.
    assert window.take() is None and window.is_over
    assert isinstance(window.error, ConnectionError)


# How many there may be

SIZES = st.integers(1, 4096)


@given(
    limit=st.none() | st.integers(1, 100),
    capacity=st.builds(
        Capacity, SIZES, st.integers(1, 64), st.none() | st.integers(1, 500)
    ),
    rows=st.integers(1, 10_000),
    sent=st.integers(0, 2**32),
    answered=st.integers(0, 2**32),
    batches=st.integers(1, 8),
)
def test_bounds_hold(
    limit: int | None,
    capacity: Capacity,
    rows: int,
    sent: int,
    answered: int,
    batches: int,
) -> None:
    inputs = Inputs()
    inputs.seen(rows, sent)
    inputs.answered(answered)
    memory = 2**28
    found = bounds(limit, capacity, inputs, batches, memory)
    # Something can always be sent.
    assert 1 <= found.in_flight <= found.kept
    if capacity.max_queue is not None:
        assert found.in_flight <= capacity.max_queue
    if limit is not None:
        assert found.kept == limit
        return
    busy = 2 * capacity.devices
    assert found.kept * inputs.nbytes <= memory or found.kept <= busy
    assert found.kept <= max(2 * (batches * capacity.rows / rows + 1), 2 * busy)


def test_bounds_follow_what_is_learned() -> None:
    def in_flight(capacity: Capacity, rows: int = 1, nbytes: int = 0) -> int:
        inputs = Inputs()
        inputs.seen(rows, nbytes)
        return bounds(None, capacity, inputs, 6, 2**20).in_flight

    assert in_flight(Capacity(rows=1, devices=1)) == 6
    assert in_flight(Capacity(rows=64, devices=1)) == 384
    assert in_flight(Capacity(rows=128, devices=2)) == 768
    assert in_flight(Capacity(rows=128, devices=2), rows=32) == 24
    assert in_flight(Capacity(rows=128, devices=2), rows=5000) == 4
    assert in_flight(Capacity(rows=128, devices=2), nbytes=2**16) == 16
    assert in_flight(Capacity(rows=128, devices=2), nbytes=2**30) == 4
    assert in_flight(Capacity(rows=128, devices=2, max_queue=3)) == 3


@given(nbytes=st.integers(0, 2**40), limit=st.none() | st.integers(1, 100))
def test_what_is_held_takes_little(nbytes: int, limit: int | None) -> None:
    inputs = Inputs()
    inputs.seen(1, nbytes)
    count = held(limit, inputs, memory=2**28)
    assert 0 <= count <= 4096 and count * nbytes <= 2**28
    assert limit is None or count == 0


def deployment(*workers: status.WorkerStatus) -> status.DeploymentStatus:
    best = {"cpu": 16, "npu/A": 64}
    return status.DeploymentStatus(
        "m",
        "2",
        (
            status.VersionStatus("1", "", False, 1, best_batch_size={"cpu": 3}),
            status.VersionStatus("2", "", True, 3, best_batch_size=best),
        ),
        workers,
        *([0] * 10),
        mean_batch_size=None,
        throughput=0.0,
        latency=status.LatencyPercentiles(),
    )


def worker(device_class: str, healthy: bool = True) -> status.WorkerStatus:
    return status.WorkerStatus(
        "tcp://10.0.0.1:1", "ready", healthy, "0", device_class=device_class
    )


def test_capacity_is_that_of_the_workers_that_serve() -> None:
    found = deployment(worker("cpu"), worker("npu/A"), worker("npu/A", healthy=False))
    assert Capacity.of(found, None, 9) == Capacity(80, 2, 9)
    assert Capacity.of(found, "1", None) == Capacity(4, 2)
    # None is ready yet, or the version is gone.
    assert Capacity.of(deployment(), None, None) == Capacity(1, 1)
    assert Capacity.of(found, "3", None) == Capacity(2, 2)


def test_inputs_are_averaged() -> None:
    inputs = Inputs()
    for _ in range(50):
        inputs.seen(4, 100)
        inputs.answered(10)
    assert inputs.rows == pytest.approx(4) and inputs.nbytes == pytest.approx(110)
    for _ in range(50):
        inputs.seen(1, 1000)
    assert inputs.rows == pytest.approx(1, rel=1e-3)
    assert inputs.nbytes == pytest.approx(1010, rel=1e-3)
    # One without rows is a request all the same.
    for _ in range(50):
        inputs.seen(0, 0)
    assert inputs.rows == pytest.approx(1, rel=1e-3)


def test_looks_become_rare_and_frequent_again() -> None:
    interval = Interval()
    rare = [interval.next(changed=False) for _ in range(20)]
    assert rare == sorted(rare) and rare[-1] == rare[-2] == 5.0
    assert interval.next(changed=True) == 0.05


def test_what_is_turned_away_is_sent_again_ever_later() -> None:
    backoff = Backoff()
    later = []
    for _ in range(10):
        backoff.tried(refused=True)
        later.append(backoff.seconds)
        assert backoff.count == 1
    assert later == sorted(later) and later[-1] == later[-2] == 1.0
    more = []
    for _ in range(10):
        backoff.tried(refused=False)
        more.append(backoff.count)
    assert more == [2**n for n in range(1, 11)] and backoff.seconds == 0.02
    backoff.tried(refused=True)
    assert backoff.count == 1
