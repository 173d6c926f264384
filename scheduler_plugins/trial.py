"""Whether a canary does worse than the active version.

Pure: counters in, a verdict out.
"""

from __future__ import annotations

import math

from daskinfer.canary import AbortPolicy
from scheduler_plugins.statistics import RECENT, Figures

#: Of a two-sided interval of 99 %.
_Z = 2.576
#: How many answers pass between two looks at the latency, which sorts the latest ones.
_EVERY = 10


def least_error_rate(failures: int, requests: int) -> float:
    """The lower end of Wilson's score interval for an error rate.

    Parameters
    ----------
    failures, requests
        What was counted.

    References
    ----------
    E. B. Wilson, "Probable inference, the law of succession, and statistical
    inference", Journal of the American Statistical Association 22 (1927).

    Examples
    --------
    >>> round(least_error_rate(20, 20), 2), round(least_error_rate(1, 20), 3)
    (0.75, 0.006)
    """
    if not requests:
        return 0.0
    rate, square = failures / requests, _Z * _Z
    center = rate + square / (2 * requests)
    spread = _Z * math.sqrt(
        rate * (1 - rate) / requests + square / (4 * requests * requests)
    )
    return max((center - spread) / (1 + square / requests), 0.0)


class Trial:
    """Compares a canary with the active version.

    Parameters
    ----------
    policy
        When it is to be given up.
    canary, stable
        The figures of both, which go on counting.

    Examples
    --------
    >>> canary, stable = Figures(), Figures()
    >>> trial = Trial(AbortPolicy(min_requests=5), canary, stable)
    >>> for _ in range(5):
    ...     canary.failed()
    >>> trial.verdict()
    '5 of its 5 requests failed, and 0 of 0 of the active version'
    """

    def __init__(self, policy: AbortPolicy, canary: Figures, stable: Figures) -> None:
        self._policy = policy
        self._canary = canary
        self._stable = stable
        self._before = stable.requests, stable.failures
        self._seen = 0

    def __repr__(self) -> str:
        return f"<Trial of {self._canary!r}>"

    def verdict(self) -> str | None:
        """Why the canary is to be given up, or None if it is not."""
        canary, policy = self._canary, self._policy
        if canary.requests < max(policy.min_requests, self._seen + 1):
            return None
        looked, self._seen = self._seen // _EVERY, canary.requests
        told = self._errors()
        if told is None and canary.requests // _EVERY > looked:
            told = self._latency()
        return told

    def _errors(self) -> str | None:
        canary = self._canary
        requests = self._stable.requests - self._before[0]
        failures = self._stable.failures - self._before[1]
        usual = failures / requests if requests else 0.0
        least = least_error_rate(canary.failures, canary.requests)
        if least <= usual + self._policy.max_error_rate:
            return None
        return (
            f"{canary.failures:,} of its {canary.requests:,} requests failed, and "
            f"{failures:,} of {requests:,} of the active version"
        )

    def _latency(self) -> str | None:
        limit, fewest = self._policy.max_latency_ratio, self._policy.min_requests
        if limit is None:
            return None
        both = self._canary, self._stable
        if any(figures.measured < min(fewest, RECENT) for figures in both):
            return None
        own, usual = (figures.latency().p50 or 0.0 for figures in both)
        if own <= limit * usual:
            return None
        return (
            f"its median latency is {1e3 * own:.3g} ms, and that of the active version "
            f"{1e3 * usual:.3g} ms"
        )
