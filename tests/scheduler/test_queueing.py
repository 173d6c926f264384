"""The queue against a plain sorted list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_plugins.queueing import Lane, RequestQueue
from scheduler_plugins.request import Request


def request(key, arrived=0.0, priority=0.0, rows=1, lane="lane"):
    return Request(key, "m", None, arrived, priority, rows, lane=lane)


def drain(queue):
    """Keys in the order in which they are served, one lane's head at a time."""
    keys = []
    while queue:
        (lane,) = queue.oldest(1)
        keys += [r.key for r in queue.take(lane, 1)]
    return keys


def test_first_come_first_served():
    queue = RequestQueue(priority_age=1.0)
    for i in range(5):
        queue.push(request(i, arrived=0.1 * i))
    assert drain(queue) == [0, 1, 2, 3, 4]


def test_requests_that_arrive_together_keep_their_order():
    queue = RequestQueue(priority_age=1.0)
    for i in range(20):
        queue.push(request(i, arrived=7.0))
    assert drain(queue) == list(range(20))


def test_a_higher_priority_overtakes():
    queue = RequestQueue(priority_age=1.0)
    queue.push(request("first", arrived=0.0))
    queue.push(request("urgent", arrived=1.0, priority=10))
    queue.push(request("never mind", arrived=2.0, priority=-10))
    assert drain(queue) == ["urgent", "first", "never mind"]


def test_a_low_priority_is_overtaken_for_a_bounded_time():
    queue = RequestQueue(priority_age=1.0)
    queue.push(request("low", arrived=0.0))
    for i in range(10):
        queue.push(request(i, arrived=0.5 * i, priority=3))
    # 3 s of waiting are worth 3 units of priority.
    overtakers = drain(queue)
    assert overtakers[: overtakers.index("low")] == [0, 1, 2, 3, 4, 5]


def test_a_request_that_comes_back_keeps_its_place():
    queue = RequestQueue(priority_age=1.0)
    first, second = request("first"), request("second", arrived=1.0)
    queue.push(first)
    queue.push(second)
    (lane,) = queue.oldest(1)
    assert queue.take(lane, 1) == [first]
    queue.push(first)
    assert drain(queue) == ["first", "second"]


def test_a_batch_is_never_larger_than_asked_for_unless_one_request_is():
    queue = RequestQueue(priority_age=1.0)
    for key, rows in [("a", 3), ("b", 4), ("c", 2), ("d", 100)]:
        queue.push(request(key, rows=rows))
    taken = []
    while queue:
        (lane,) = queue.oldest(1)
        taken.append([r.key for r in queue.take(lane, 8)])
    assert taken == [["a", "b"], ["c"], ["d"]]


def test_requests_without_rows_ride_along():
    queue = RequestQueue(priority_age=1.0)
    for key in "abc":
        queue.push(request(key, rows=0))
    (lane,) = queue.oldest(1)
    assert [r.key for r in queue.take(lane, 1)] == ["a", "b", "c"]
    assert (queue.count, queue.rows) == (0, 0)


def test_lanes_are_named_by_their_oldest_request():
    queue = RequestQueue(priority_age=1.0)
    queue.push(request("x", arrived=1.0, lane="x"))
    queue.push(request("y", arrived=0.0, lane="y"))
    queue.push(request("z", arrived=2.0, lane="z"))
    assert [lane.key for lane in queue.oldest(2)] == ["y", "x"]
    assert [lane.key for lane in queue.oldest(9)] == ["y", "x", "z"]


def test_requests_of_one_constraint_hide_none_of_another():
    queue = RequestQueue(priority_age=1.0)
    for i in range(10):
        stuck = request(i, arrived=float(i), lane=f"stuck-{i}")
        stuck.constraint = "nowhere"
        queue.push(stuck)
    queue.push(request("free", arrived=1.5, lane="free"))
    assert [lane.key for lane in queue.oldest(3)] == [
        "stuck-0",
        "stuck-1",
        "free",
        "stuck-2",
    ]
    queue.take(queue.oldest(3)[2], 1)
    assert {lane.head().constraint for lane in queue.oldest(3)} == {"nowhere"}


def test_a_request_that_changes_its_lane_leaves_nothing_behind():
    """As one does whose worker died: from then on it runs alone."""
    queue = RequestQueue(priority_age=1.0)
    ahead, moving = request("ahead"), request("moving", arrived=1.0)
    queue.push(ahead)
    queue.push(moving)
    queue.discard(moving)
    moving.lane = "alone"
    queue.push(moving)
    shared = next(lane for lane in queue.oldest(2) if lane.key == "lane")
    assert queue.take(shared, 10) == [ahead]
    assert [lane.key for lane in queue.oldest(2)] == ["alone"]
    assert queue.requests() == [moving]
    assert drain(queue) == ["moving"]


def test_a_discarded_request_is_not_served():
    queue = RequestQueue(priority_age=1.0)
    requests = [request(i, arrived=i) for i in range(4)]
    for each in requests:
        queue.push(each)
    queue.discard(requests[0])
    queue.discard(requests[2])
    queue.discard(requests[2])
    assert drain(queue) == [1, 3]


def test_what_is_there_is_shown():
    queue = RequestQueue(priority_age=1.0)
    queue.push(request("a", rows=3))
    assert repr(queue) == "<RequestQueue waiting: 1 lanes: 1>"
    assert repr(queue.oldest(1)[0]) == "<Lane 'lane' waiting: 1 rows: 3>"


def test_an_empty_lane_has_no_head():
    assert Lane("lane").head() is None


@pytest.mark.parametrize("lanes", [1, 5000])
def test_a_long_queue_is_taken_in_order(lanes):
    queue = RequestQueue(priority_age=1.0)
    for i in range(5000):
        queue.push(request(i, arrived=float(i), lane=i % lanes))
    assert drain(queue) == list(range(5000))
    assert queue.requests() == []


class QueueMachine(RuleBasedStateMachine):
    """Random use, compared with lists that are sorted anew each time."""

    LANES = st.sampled_from("abc")

    def __init__(self):
        super().__init__()
        self.queue = RequestQueue(priority_age=1.0)
        self.clock = 0.0
        self.waiting = []
        self.taken = []
        self.orders = {}

    def lane_of(self, name):
        return sorted(
            (r for r in self.waiting if r.lane == name),
            key=lambda r: self.orders[r.key],
        )

    @rule(
        lane=LANES,
        rows=st.integers(0, 5),
        priority=st.integers(-2, 2),
        passed=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def push(self, lane, rows, priority, passed):
        self.clock += passed
        key = len(self.orders)
        new = request(key, self.clock, priority, rows, lane)
        self.queue.push(new)
        self.orders[key] = (self.clock - priority, key)
        self.waiting.append(new)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), lane=LANES)
    def come_back(self, data, lane):
        again = data.draw(st.sampled_from(self.taken))
        self.taken.remove(again)
        again.lane = lane
        self.queue.push(again)
        self.waiting.append(again)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def discard(self, data):
        gone = data.draw(st.sampled_from(self.waiting))
        self.queue.discard(gone)
        self.waiting.remove(gone)
        self.taken.append(gone)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), rows=st.integers(1, 12))
    def take(self, data, rows):
        lane = data.draw(st.sampled_from(self.queue.oldest(3)))
        expected = []
        left = rows
        for each in self.lane_of(lane.key):
            if expected and each.rows > left:
                break
            expected.append(each)
            left -= each.rows
            if left <= 0:
                break
        assert self.queue.take(lane, rows) == expected
        for each in expected:
            self.waiting.remove(each)
        self.taken += expected

    @invariant()
    def counts_are_right(self):
        assert len(self.queue) == len(self.waiting)
        assert self.queue.rows == sum(r.rows for r in self.waiting)
        key = lambda r: r.key  # noqa: E731
        assert sorted(self.queue.requests(), key=key) == sorted(self.waiting, key=key)
        assert all(r.waiting for r in self.waiting)
        assert not any(r.waiting for r in self.taken)

    @invariant()
    def lanes_come_oldest_first(self):
        heads = {name: found[0] for name in "abc" if (found := self.lane_of(name))}
        expected = sorted(heads, key=lambda name: self.orders[heads[name].key])
        lanes = self.queue.oldest(3)
        assert [lane.key for lane in lanes] == expected
        for lane in lanes:
            members = self.lane_of(lane.key)
            assert lane.head() is members[0]
            assert len(lane) == len(members)
            assert lane.rows == sum(r.rows for r in members)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
