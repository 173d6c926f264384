"""How many workers are wanted, through bursts and lulls, without a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.elasticity import MAX_LAG, WINDOW, Demand, Elasticity

DELAY, COOL_DOWN = 2.0, 60.0
#: Rows that one device runs in a second.
RATE = 100


@dataclass
class Cluster:
    """Workers that come when they have been wanted for so long.

    They are asked for and closed as Dask's ``Adaptive`` does it, once a second.
    """

    lag: float
    serving: int = 1
    minimum: int = 0
    maximum: int = 1000
    policy: Elasticity = field(default_factory=lambda: Elasticity(DELAY, COOL_DOWN))
    now: float = 0.0
    backlog: float = 0.0
    used_at: float = -math.inf
    busy: dict[int, float] = field(default_factory=dict)
    coming: list[float] = field(default_factory=list)
    #: What was wanted each second, within the limits.
    wanted: list[int] = field(default_factory=list)
    reason: str = ""
    _lower: int = 0

    def __post_init__(self) -> None:
        self.busy = {number: 0.0 for number in range(self.serving)}
        self._number = self.serving

    def second(self, work: float) -> None:
        """Let work for so many device-seconds arrive, and a second pass."""
        self.now += 1
        while self.coming and self.coming[0] <= self.now:
            self.coming.pop(0)
            self.serving += 1
            self.busy[self._number] = 0.0
            self._number += 1
        self.backlog += work
        done = min(self.backlog, self.serving)
        self.backlog -= done
        for number in self.busy:
            self.busy[number] += done / self.serving
        active = bool(work or self.backlog or done)
        if active:
            self.used_at = self.now
        waits = self.backlog > 0
        target = self.policy.look(
            Demand(
                workers=self.serving,
                serving=self.serving,
                busy=dict(self.busy),
                hands=self.serving if waits else 0,
                backlog=self.backlog,
                waiting=math.ceil(self.backlog * RATE),
                active=active,
                unserved=active and not self.serving,
                used_at=self.used_at,
            ),
            self.now,
        )
        self.reason = target.reason
        self._adapt(min(max(target.workers, self.minimum), self.maximum))

    def _adapt(self, wanted: int) -> None:
        self.wanted.append(wanted)
        planned = self.serving + len(self.coming)
        if wanted > planned:
            self.coming += [self.now + self.lag] * (wanted - planned)
        self._lower = self._lower + 1 if wanted < planned else 0
        if self._lower >= 3:
            while self.coming and wanted < self.serving + len(self.coming):
                self.coming.pop()
            while wanted < self.serving:
                self.serving -= 1
                self.busy.pop(min(self.busy))
            self._lower = 0

    def run(self, *phases: tuple[float, int]) -> list[int]:
        """Let device-seconds per second arrive, for seconds; what was wanted then."""
        before = len(self.wanted)
        for work, seconds in phases:
            for _ in range(seconds):
                self.second(work)
        return self.wanted[before:]

    @property
    def delay(self) -> float:
        """Seconds that who arrives now will wait."""
        return self.backlog / self.serving if self.serving else math.inf


@pytest.mark.parametrize("lag", [1.0, 5.0, 30.0])
def test_a_burst_and_a_lull(lag):
    cluster = Cluster(lag, minimum=1)
    cluster.run((0.3, 200))
    assert set(cluster.wanted) == {1}
    cluster.second(50.0)
    assert cluster.wanted[-1] >= 50 / DELAY
    cluster.run((0.3, int(lag) + 20))
    assert cluster.backlog == 0
    # Quiet, but not for long enough; then in steps down to what the rest needs.
    high = max(cluster.wanted)
    quiet = cluster.run((0.3, 200))
    assert quiet[0] == high and quiet[-1] == 1
    assert sorted(quiet, reverse=True) == quiet
    assert cluster.serving == 1
    # The second time it is known how long workers take to come.
    cluster.second(50.0)
    enough = 49 / (DELAY + lag)
    assert enough <= cluster.wanted[-1] <= 1.4 * enough + 1


@pytest.mark.parametrize("lag", [0.0, 3.0, 30.0, 90.0])
@pytest.mark.parametrize("load", [0.7, 2.0, 3.9, 12.0])
def test_a_load_that_goes_on_is_served_in_time_by_few(load, lag):
    cluster = Cluster(lag)
    cluster.run((load, 1500))
    assert cluster.delay <= DELAY
    # Some more than it takes: what has piled up is to be worked off as well.
    assert math.ceil(load) <= cluster.serving <= 2 * load + 1
    # And no more coming and going.
    assert len(set(cluster.wanted[-300:])) == 1


@pytest.mark.parametrize("lag", [10.0, 60.0])
def test_those_on_their_way_count(lag):
    cluster = Cluster(lag)
    cluster.run((3.0, int(lag)))
    assert cluster.serving == 1 and cluster.backlog > 5 * DELAY
    # The queue grows all the time, as was to be expected.
    assert 3 <= max(cluster.wanted) <= 6


def test_nobody_is_started_for_what_will_be_done_by_then():
    cluster = Cluster(60.0, minimum=1)
    cluster.run((0.0, 5), (200.0, 1), (0.0, 400))
    assert cluster.serving == 1 and cluster.policy.lag == 60
    assert cluster.run((40.0, 1), (0.0, 40)) == [1] * 41
    assert 400 / 62 <= max(cluster.run((400.0, 1), (0.0, 100))) <= 1.4 * 400 / 62 + 1


def test_a_wait_that_nothing_predicts_brings_one_more():
    """As where batches take longer than is known, or other work is in the way."""
    policy = Elasticity(DELAY, COOL_DOWN)
    late = {"workers": 2, "serving": 2, "hands": 2, "active": True, "backlog": 0.1}
    assert policy.look(Demand(**late, waiting=5, waited=1.9), 0.0).workers < 3
    for now in range(1, 30):
        target = policy.look(Demand(**late, waiting=5, waited=1.0 + now), float(now))
        assert target.workers <= 3
    assert target.workers == 3 and "had waited for" in target.reason


def test_a_device_that_is_busy_all_the_time_is_enough_where_nobody_waits_for_long():
    """As for one who sends the next requests when the last are answered."""
    policy = Elasticity(DELAY, COOL_DOWN)
    there = {"workers": 1, "serving": 1, "hands": 1, "active": True, "waiting": 100}
    for now in range(100):
        busy = {"a": float(now)}
        demand = Demand(**there, busy=busy, backlog=DELAY, waited=DELAY)
        assert policy.look(demand, float(now)).workers == 1


def test_what_could_go_to_a_free_device_asks_for_nobody():
    policy = Elasticity(DELAY, COOL_DOWN)
    # As the shell tells it: it waits for something else than a device.
    demand = Demand(workers=1, serving=1, active=True)
    assert policy.look(demand, 0.0).workers == 1


def test_few_requests_need_few_workers_however_long_they_take():
    policy = Elasticity(DELAY, COOL_DOWN)
    demand = Demand(
        workers=1, serving=1, hands=1, backlog=900.0, waiting=3, active=True
    )
    assert policy.look(demand, 0.0).workers == 4


def test_the_last_worker_stays_until_the_cool_down_is_over():
    cluster = Cluster(1.0)
    cluster.run((0.1, 1))
    quiet = cluster.run((0.0, 100))
    assert quiet.index(0) == pytest.approx(COOL_DOWN, abs=1)
    assert quiet == sorted(quiet, reverse=True)
    assert cluster.reason == "nothing was asked for within 60 s"
    # And a request brings one back.
    assert cluster.serving == 0
    cluster.second(0.05)
    assert cluster.wanted[-1] == 1
    cluster.run((0.05, 5))
    assert cluster.serving == 1 and cluster.delay <= DELAY


def test_what_is_used_between_two_looks_counts():
    policy = Elasticity(DELAY, COOL_DOWN)
    there = {"workers": 1, "serving": 1}
    assert policy.look(Demand(**there), 0.0).workers == 0
    assert policy.look(Demand(**there, used_at=100.0), 100.5).workers == 1
    assert policy.look(Demand(**there, used_at=100.0), 100.0 + COOL_DOWN).workers == 1
    assert policy.look(Demand(**there, used_at=100.0), 100.5 + COOL_DOWN).workers == 0


def test_devices_that_are_busy_all_the_time_are_kept():
    """With requests that take minutes, and nothing that waits."""
    policy = Elasticity(DELAY, cool_down=5.0)
    for now in range(100):
        busy = {str(number): float(now) for number in range(3)} | {"idle": 0.0}
        demand = Demand(workers=4, serving=4, busy=busy, active=True)
        target = policy.look(demand, float(now))
        if now > WINDOW:
            # The fourth is what leaves them some of their time.
            assert target.workers == 4
    assert target.reason == "3 devices were busy on average"


def test_workers_that_serve_nothing_are_no_reason_for_more_of_them():
    policy = Elasticity(DELAY, COOL_DOWN)
    short = {"serving": 1, "hands": 1, "backlog": 7.0, "waiting": 99, "active": True}
    # Four are needed, beside the two that were there for something else.
    assert policy.look(Demand(workers=3, **short), 0.0).workers == 6
    # What comes is of no use: still four beside those two.
    assert policy.look(Demand(workers=6, **short), 0.1).workers == 6
    assert policy.look(Demand(workers=9, **short), 0.2).workers == 6


def test_what_nobody_serves_asks_for_one_worker_once():
    policy = Elasticity(DELAY, COOL_DOWN)
    asked = {"waiting": 5, "active": True, "unserved": True}
    assert policy.look(Demand(workers=2, **asked), 0.0).workers == 3
    told = policy.look(Demand(workers=3, **asked), 1.0)
    assert (told.workers, told.reason) == (3, "no worker serves what is asked for")
    # Later, another time.
    policy.look(Demand(workers=3), 2.0)
    assert policy.look(Demand(workers=3, **asked), 3.0).workers == 4


def test_without_a_cool_down_it_follows_at_once():
    policy = Elasticity(DELAY, cool_down=0.0)
    there = {"workers": 1, "serving": 1, "hands": 1}
    busy = Demand(**there, backlog=20.0, waiting=100, active=True)
    assert policy.look(busy, 0.0).workers == 10
    assert policy.look(Demand(workers=1, serving=1), 0.1).workers == 0


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    workers = draw(st.integers(0, 20))
    serving = draw(st.integers(0, workers))
    waiting = draw(st.integers(0, 1000))
    return Demand(
        workers=workers,
        serving=serving,
        coming=draw(st.integers(0, workers - serving)),
        busy={str(n): draw(st.floats(0, 1e4)) for n in range(serving)},
        hands=draw(st.integers(0, serving)) if waiting else 0,
        backlog=draw(st.floats(0, 1e6)) if waiting else 0.0,
        waiting=waiting,
        waited=draw(st.floats(0, 1e4)) if waiting else 0.0,
        active=bool(waiting) or draw(st.booleans()),
        unserved=draw(st.booleans()) if waiting else False,
    )


@given(st.lists(st.tuples(demands(), st.floats(0, 100)), min_size=1, max_size=30))
def test_in_any_case(history: list[tuple[Demand, float]]):
    policy = Elasticity(DELAY, COOL_DOWN)
    now = 0.0
    useful: list[tuple[float, int]] = []
    for demand, passed in history:
        now += passed
        target = policy.look(demand, now)
        assert target.reason
        # Whoever asks is answered.
        assert target.workers >= int(demand.active)
        # Never more than could lately have had something to do, and were of no use.
        useful.append((now, demand.serving + demand.waiting + 1))
        most = max(count for at, count in useful if at >= now - COOL_DOWN)
        assert target.workers <= most + max(d.workers for d, _ in history)
        assert 0 <= policy.lag <= MAX_LAG


@given(st.lists(st.floats(0, 30), min_size=1, max_size=200), st.floats(0, 100))
def test_it_goes_down_only_after_the_cool_down(loads: list[float], lag: float):
    cluster = Cluster(lag)
    for load in loads:
        cluster.second(load)
        recent = cluster.wanted[-int(COOL_DOWN) - 1 :]
        # The most that was wanted lately, but for those beside who serve nothing.
        assert cluster.wanted[-1] == max(recent)


@given(st.floats(0, 20), st.floats(0, 60), st.integers(0, 3))
def test_idle_it_ends_at_the_minimum(load: float, lag: float, minimum: int):
    cluster = Cluster(lag, minimum=minimum)
    cluster.run((load, 50), (0.0, 50))
    for _ in range(2000):
        if not cluster.backlog:
            break
        cluster.second(0.0)
    cluster.run((0.0, int(COOL_DOWN + WINDOW) + 5))
    assert cluster.serving == minimum and not cluster.coming
