"""Whether a request whose attempt failed is tried again, and when.

Pure: time and chance are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from daskinfer.exceptions import RequestFailed, WorkerLost
from daskinfer.retry import RetryPolicy

__all__ = ["Fail", "Retry", "backoff", "decide"]


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again, not before a monotonic time in seconds."""

    not_before: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up: the budget is used up, or the policy does not retry such failures."""


def decide(
    policy: RetryPolicy,
    kind: type[RequestFailed],
    charges: int,
    now: float,
    chance: float,
) -> Retry | Fail:
    """Decide about a request under which an attempt has just failed.

    Parameters
    ----------
    policy
        What the user asked for.
    kind
        What happened.
    charges
        Attempts that ended so, this one included.
    now
        Monotonic time in seconds.
    chance
        A random number in [0, 1).

    Examples
    --------
    >>> policy = RetryPolicy(max_attempts=2, backoff=1.0, jitter=0)
    >>> decide(policy, WorkerLost, 1, now=5.0, chance=0.0)
    Retry(not_before=5.0)
    >>> decide(policy, WorkerLost, 2, now=5.0, chance=0.0)
    Fail()
    """
    if charges >= policy.max_attempts or not policy.retries(kind):
        return Fail()
    if issubclass(kind, WorkerLost):
        # There is nothing to wait for: whatever was wrong there is gone.
        return Retry(now)
    return Retry(now + backoff(policy, charges, chance))


def backoff(policy: RetryPolicy, charges: int, chance: float) -> float:
    """Seconds to wait after so many failures: doubled each time, then spread.

    The wait is shortened by a random share of up to ``policy.jitter``, so that
    requests which failed together do not come back together [1]_.

    References
    ----------
    .. [1] M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    Examples
    --------
    >>> policy = RetryPolicy(backoff=1.0, max_backoff=3.0, jitter=0.5)
    >>> [backoff(policy, charges, 0.0) for charges in (1, 2, 3, 10_000)]
    [1.0, 2.0, 3.0, 3.0]
    >>> backoff(policy, 1, 0.5)
    0.75
    """
    # Beyond 64 doublings anything is above its maximum, and floats overflow.
    doubled = policy.backoff * 2.0 ** min(charges - 1, 64)
    return min(doubled, policy.max_backoff) * (1 - policy.jitter * chance)
