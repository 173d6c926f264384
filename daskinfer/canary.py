"""When a canary is given up without anybody being asked."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from daskinfer.fields import number_within, size


@dataclass(frozen=True)
class AbortPolicy:
    """When a canary is given up, going by its figures and those of the active version.

    Parameters
    ----------
    max_error_rate : float
        By how much the canary's share of failed requests may exceed the active
        version's, between 0 and 1. It is given up when the lower end of the canary's
        99 % confidence interval (Wilson's score interval) is above that, so that a few
        failures among few requests are not taken for more than they are.
    max_latency_ratio : float, optional
        How many times the active version's median latency the canary's may be, from
        arrival to answer, over the latest 4,096 answers of each; None: any.
    min_requests : int
        So many requests of the canary must have ended before it is judged; for the
        latency, so many of each version must have been answered.

    Raises
    ------
    TypeError, ValueError
        A field is wrong; the message names it.

    Notes
    -----
    Immutable, so it can be shared between threads. Failures of the active version are
    counted from the moment the canary began.

    Examples
    --------
    >>> AbortPolicy(max_latency_ratio=2).max_error_rate
    0.05
    >>> AbortPolicy(max_error_rate=5)
    Traceback (most recent call last):
        ...
    ValueError: max_error_rate must be between 0 and 1, got 5
    """

    max_error_rate: float = 0.05
    max_latency_ratio: float | None = None
    min_requests: int = 20

    def __post_init__(self) -> None:
        rate = number_within("max_error_rate", self.max_error_rate, 0, 1)
        object.__setattr__(self, "max_error_rate", rate)
        ratio = self.max_latency_ratio
        if ratio is not None:
            ratio = number_within("max_latency_ratio", ratio, 1, math.inf)
        object.__setattr__(self, "max_latency_ratio", ratio)
        object.__setattr__(
            self, "min_requests", size("min_requests", self.min_requests)
        )

    def to_message(self) -> dict[str, Any]:
        """As plain data.

        >>> AbortPolicy(**AbortPolicy().to_message()) == AbortPolicy()
        True
        """
        return asdict(self)
