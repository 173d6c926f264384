"""Which workers are fit to serve a deployment version.

A breaker for each worker; and the question whether a worker is to blame for batches
that fail on it, or what is in them. Pure: the time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from daskinfer.breaker import BreakerPolicy
from scheduler_plugins.breaker import Breaker, BreakerState

__all__ = ["Health", "Suspicion", "is_to_blame"]

#: Below this probability nobody believes in bad luck with the inputs any more.
_BAD_LUCK = 1e-6
#: Batches in a row that fail altogether, from which on a worker gets no more of them
#: in a given time than one that is well.
_PACED_FROM = 2
#: Failures in a row beyond which counting adds nothing.
_REMEMBERED = 1000


def is_to_blame(failed: int, others_failed: int, others_answered: int) -> bool:
    """Whether batches that failed altogether, in a row, tell against their worker.

    Were it the inputs, each batch would fail with the probability that it has on the
    other workers meanwhile, estimated by Laplace's rule of succession. The worker is
    to blame if so many failures in a row are beyond belief then.

    Parameters
    ----------
    failed
        Batches of the worker, since it last answered a request.
    others_failed, others_answered
        Batches of the others since then: failed altogether, and answered at least
        in part.

    Examples
    --------
    >>> is_to_blame(3, 0, 100), is_to_blame(3, 50, 50), is_to_blame(100, 10, 0)
    (True, False, False)
    """
    if not others_answered:
        return False
    usual = (others_failed + 1) / (others_failed + others_answered + 2)
    return failed * math.log(usual) < math.log(_BAD_LUCK)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """From when on a batch that is not answered tells against its device.

    Parameters
    ----------
    factor
        How many times the predicted time may pass ...
    after
        ... and how many seconds at least, before the device is suspect.
    hung_after
        How many seconds after a batch was given up for being past its time limit the
        device counts as hung.

    Examples
    --------
    >>> Suspicion(factor=20, after=5.0).limit(0.1), Suspicion(20, 5.0).limit(1.0)
    (5.0, 20.0)
    """

    factor: float
    after: float
    hung_after: float = math.inf

    def limit(self, predicted: float) -> float:
        """Seconds on the device from which on a batch is suspect."""
        return max(self.factor * predicted, self.after)


@dataclass(slots=True)
class _Streak:
    """Batches in a row that failed altogether on a worker.

    ``good`` and ``bad`` are what the version had in all when it began; ``own`` are
    those of the worker since, ``times`` when those within the window ended.
    """

    good: int
    bad: int
    own: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    rests_until: float = -math.inf
    blamed: bool = False


class Health:
    """The breakers of one version, by worker.

    Parameters
    ----------
    policy
        What the user asked for.

    Attributes
    ----------
    breakers
        Of workers that are not well.

    Examples
    --------
    >>> health = Health(BreakerPolicy(cooldown=5.0))
    >>> health.open("tcp://a:1", 0.0, "its batch took too long")
    True
    >>> health.admits("tcp://a:1"), health.admits("tcp://b:1"), health.next(0.0)
    (False, True, 5.0)
    """

    def __init__(self, policy: BreakerPolicy) -> None:
        self.breakers: dict[str, Breaker] = {}
        self._policy = policy
        self._streaks: dict[str, _Streak] = {}
        self._good = 0
        self._bad = 0

    def __repr__(self) -> str:
        return f"<Health breakers: {self.breakers}>"

    # Asking

    def admits(self, address: str) -> bool:
        """Whether a worker's breaker is closed."""
        breaker = self.breakers.get(address)
        return breaker is None or breaker.is_closed

    def rests(self, address: str, now: float) -> bool:
        """Whether a worker that fails fast would have been busy until later."""
        streak = self._streaks.get(address)
        return streak is not None and now < streak.rests_until

    def state(self, address: str, now: float) -> tuple[BreakerState, str | None]:
        """The state of a worker's breaker, and why it is not closed."""
        breaker = self.breakers.get(address)
        if breaker is None:
            return BreakerState.CLOSED, None
        return breaker.state(now), breaker.reason

    def candidates(self, now: float) -> list[str]:
        """Workers to be tried with one request."""
        return [a for a, breaker in self.breakers.items() if breaker.wants_probe(now)]

    @property
    def is_perfect(self) -> bool:
        """Whether nothing is held against any worker."""
        return not self.breakers and not self._streaks

    def next(self, now: float) -> float:
        """When a worker may be given requests again; infinite if none waits for it."""
        times = [breaker.next() for breaker in self.breakers.values()]
        times += [streak.rests_until for streak in self._streaks.values()]
        return min((at for at in times if at > now), default=math.inf)

    # What happens

    def open(self, address: str, now: float, reason: str) -> bool:
        """Open a worker's breaker at once; tell whether it has opened by that."""
        return self._breaker(address).open(now, reason)

    def doubt(self, address: str, now: float, reason: str) -> bool:
        """Try a worker with one request before it is given more."""
        return self._breaker(address).doubt(now, reason)

    def try_with(self, address: str, batch_id: str) -> None:
        """Note the batch that decides about a worker."""
        self._breaker(address).try_with(batch_id)

    def answered(
        self, address: str, batch_id: str, *, retry: bool = False
    ) -> BreakerState | None:
        """A worker has answered requests.

        A ``retry`` is no evidence for or against others: those who have failed before
        are no sample of all.

        Returns
        -------
        BreakerState or None
            The new state of its breaker, if it has changed by that.
        """
        self._good += not retry
        self._streaks.pop(address, None)
        breaker = self.breakers.get(address)
        is_probe = breaker is not None and breaker.probe == batch_id
        return self._close(address) if is_probe else None

    def refused(
        self,
        address: str,
        batch_id: str,
        now: float,
        busy_until: float,
        reason: str,
        *,
        retry: bool = False,
    ) -> BreakerState | None:
        """A batch failed altogether, by the model's own exceptions.

        Parameters
        ----------
        address, batch_id, now
            Where, what and when.
        busy_until
            Until when the worker would have been busy had it done its work.
        reason
            What to say should the worker be to blame.
        retry
            Whether its requests have failed elsewhere before: that is no evidence.

        Returns
        -------
        BreakerState or None
            The new state of the worker's breaker, if it has changed by that.
        """
        streak = self._streak(address, now, retry)
        if streak.own >= _PACED_FROM:
            streak.rests_until = busy_until
        breaker = self.breakers.get(address)
        if breaker is not None and breaker.probe == batch_id and not streak.blamed:
            # It was open for being late, and this is an answer in time.
            return self._close(address)
        streak.blamed = streak.blamed or self._is_to_blame(streak)
        opened = streak.blamed and self.open(address, now, reason)
        return BreakerState.OPEN if opened else None

    def undecided(self, address: str, batch_id: str) -> None:
        """A batch has ended and tells nothing: nobody wanted it any more."""
        breaker = self.breakers.get(address)
        if breaker is not None and breaker.probe == batch_id:
            breaker.probe = None

    def forget(self, address: str) -> None:
        """A worker is gone."""
        self.breakers.pop(address, None)
        self._streaks.pop(address, None)

    def clear(self) -> None:
        """Forget all batches: no trial under way is going to be answered."""
        for breaker in self.breakers.values():
            breaker.probe = None

    def _breaker(self, address: str) -> Breaker:
        return self.breakers.setdefault(address, Breaker(self._policy))

    def _close(self, address: str) -> BreakerState:
        del self.breakers[address]
        return BreakerState.CLOSED

    def _streak(self, address: str, now: float, retry: bool) -> _Streak:
        streak = self._streaks.get(address)
        if streak is not None and not streak.blamed:
            while streak.times and streak.times[0] < now - self._policy.window:
                streak.times.popleft()
        if streak is None or not (streak.times or streak.blamed):
            streak = self._streaks[address] = _Streak(self._good, self._bad)
        if not retry:
            self._bad += 1
            streak.own += 1
            streak.times.append(now)
        return streak

    def _is_to_blame(self, streak: _Streak) -> bool:
        failed = len(streak.times)
        return failed >= self._policy.failures and is_to_blame(
            failed, self._bad - streak.bad - streak.own, self._good - streak.good
        )
