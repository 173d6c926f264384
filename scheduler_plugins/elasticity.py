"""How many workers what is asked for is worth.

More are wanted at once, and fewer only when they have not been needed for a while, as
workers are cheap to keep and dear to start: processes begin, weights are loaded, models
are run in.

Pure: numbers and the time in, a number out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Seconds over which it is measured how busy devices are, at least.
WINDOW = 10.0
#: Share of their time that devices may be busy for one of them to be given up.
BUSY_SHARE = 0.8
#: Seconds that a new worker is believed to take, at most.
MAX_LAG = 300.0

# How many times as long as what is asked for may take the load is measured: a burst is
# not to be taken for load that goes on.
_LAGS = 4
_READINGS = 100
# Devices that have been watched for less have not been busy for the rest of it.
_LEAST = 1.0
# What is a whole number but for rounding.
_EXACT = 1e-6


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of the cluster at one moment, and who is there.

    Attributes
    ----------
    workers
        All of the cluster's.
    serving
        Those of them that can be given requests now.
    coming
        Those that have just started, or are loading what they will serve.
    busy
        Seconds that each worker's device was busy so far.
    hands
        Devices that serve what waits, none of which is free.
    backlog
        Seconds that one device needs for what waits for these, or for ones to come.
        What could go to a device that is free waits for something else.
    waiting, waited
        How many requests these are, and for how long the next of them has waited.
    active
        Whether any request waits or is running.
    unserved
        Whether something is asked for that no worker serves, nor will soon.
    used_at
        When somebody last used what is deployed, or it became ready.
    """

    workers: int = 0
    serving: int = 0
    coming: int = 0
    busy: Mapping[str, float] = field(default_factory=dict)
    hands: int = 0
    backlog: float = 0.0
    waiting: int = 0
    waited: float = 0.0
    active: bool = False
    unserved: bool = False
    used_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Target:
    """How many workers are wanted, and why."""

    workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    busy: Mapping[str, float]
    backlog: float


class Elasticity:
    """Decides how many workers there should be.

    So many are wanted that what waits is worked off within the target delay, and the
    time that a new worker takes to come: nobody is started who would find the work
    done. To that comes what arrives meanwhile. While the present ones keep the delay,
    no more are wanted; and as many as would still have some of their time left.

    Parameters
    ----------
    delay
        Seconds that requests may wait for a device.
    cool_down
        Seconds for which a worker was not needed before it is given up.

    Examples
    --------
    >>> policy = Elasticity(delay=2.0, cool_down=60.0)
    >>> one = {"workers": 1, "serving": 1, "hands": 1, "active": True}
    >>> policy.look(Demand(**one, backlog=1.0, waiting=50), now=0.0).workers
    1
    >>> policy.look(Demand(**one, backlog=8.0, waiting=400), now=1.0).workers
    5
    >>> policy.look(Demand(workers=5, serving=5), now=30.0).workers
    5
    >>> policy.look(Demand(workers=5, serving=5), now=90.0)
    Target(workers=0, reason='nothing was asked for within 60 s')
    """

    def __init__(self, delay: float, cool_down: float) -> None:
        self.delay = delay
        self.cool_down = cool_down
        self.lag = 0.0
        self._readings: deque[_Reading] = deque()
        # Never rising: the first is the most that was needed within the cool-down.
        self._needs: deque[tuple[float, int, str]] = deque()
        self._asked_at: float | None = None
        self._serving = 0
        self._others = 0
        self._unserved: int | None = None

    def __repr__(self) -> str:
        wanted = self._needs[0][1] if self._needs else 0
        return f"<Elasticity wanted: {wanted} lag: {self.lag:.3g} s>"

    def look(self, demand: Demand, now: float) -> Target:
        """How many workers are wanted now.

        Parameters
        ----------
        demand
            What is asked for.
        now
            Monotonic time in seconds.
        """
        self._read(demand, now)
        self._measure_lag(demand, now)
        need, reason = self._need(demand, now)
        target = self._held(need, reason, demand, now)
        if target.workers > demand.serving:
            if self._asked_at is None:
                self._asked_at = now
                # Those who serve nothing are no help, and may be of the same kind as
                # those to come: counted again and again, they would be ever more.
                self._others = max(demand.workers - demand.serving - demand.coming, 0)
            target = Target(target.workers + self._others, target.reason)
        else:
            self._asked_at = None
        return self._with_unserved(target, demand)

    def _read(self, demand: Demand, now: float) -> None:
        """Remember how busy devices were, no further back than it is of use."""
        readings, window = self._readings, self._window(now)
        if not readings or now - readings[-1].at >= window / _READINGS:
            readings.append(_Reading(now, demand.busy, demand.backlog))
        while len(readings) > 1 and readings[1].at <= now - window:
            readings.popleft()

    def _measure_lag(self, demand: Demand, now: float) -> None:
        if self._asked_at is not None and demand.serving > self._serving:
            self.lag = min(now - self._asked_at, MAX_LAG)
        self._serving = demand.serving

    def _horizon(self, now: float) -> float:
        """Until what waits now should be done, if another worker were asked for."""
        under_way = 0.0 if self._asked_at is None else now - self._asked_at
        return self.delay + min(max(self.lag, under_way), MAX_LAG)

    def _window(self, now: float) -> float:
        return max(WINDOW, _LAGS * self._horizon(now))

    def _need(self, demand: Demand, now: float) -> tuple[int, str]:
        """How many workers are needed now, the past aside."""
        used = self._used(demand, now, WINDOW)
        need = min(_whole(used / BUSY_SHARE), demand.serving)
        reason = f"{used:.2g} devices were busy on average"
        if demand.active and need < 1:
            need, reason = 1, "there were requests"
        late = demand.backlog / max(demand.hands, 1)
        if late > self.delay or (demand.backlog and not demand.hands):
            worth = self._load(demand, now) + demand.backlog / self._horizon(now)
            most = demand.serving + demand.waiting
            more = max(min(_whole(worth), most), 1)
            if more > need:
                need = more
                reason = f"what waited took {late:,.1f} s"
        if demand.waited > self.delay + self.lag and need <= demand.serving:
            need = demand.serving + 1
            reason = f"requests had waited for {demand.waited:,.1f} s"
        return need, reason

    def _load(self, demand: Demand, now: float) -> float:
        """How many devices what arrives keeps busy, with what piles up of it."""
        window, first = self._window(now), self._readings[0]
        growth = (demand.backlog - first.backlog) / max(window, now - first.at)
        return max(self._used(demand, now, window) + growth, 0.0)

    def _used(self, demand: Demand, now: float, window: float) -> float:
        """How many devices were busy on average."""
        past = (r for r in reversed(self._readings) if r.at <= now - window)
        first = next(past, self._readings[0])
        seconds = max(now - first.at, _LEAST)
        return sum(
            min(max(total - first.busy.get(worker, 0.0), 0.0) / seconds, 1.0)
            for worker, total in demand.busy.items()
        )

    def _held(self, need: int, reason: str, demand: Demand, now: float) -> Target:
        """The most that was needed within the cool-down."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now, need, reason))
        while self._needs[0][0] < now - self.cool_down:
            self._needs.popleft()
        at, most, reason = self._needs[0]
        if at < now:
            reason = f"{reason}, {now - at:.0f} s ago"
        if most < 1:
            if now - demand.used_at <= self.cool_down:
                return Target(1, f"it was used {now - demand.used_at:.0f} s ago")
            return Target(0, f"nothing was asked for within {self.cool_down:g} s")
        return Target(most, reason)

    def _with_unserved(self, target: Target, demand: Demand) -> Target:
        """One more than there were when nobody served what is asked for.

        No more than that: workers of the same kind would not serve it, either.
        """
        if not demand.unserved:
            self._unserved = None
            return target
        if self._unserved is None:
            self._unserved = demand.workers + 1
        if self._unserved < target.workers:
            return target
        return Target(self._unserved, "no worker serves what is asked for")


def _whole(number: float) -> int:
    return math.ceil(number - _EXACT)
