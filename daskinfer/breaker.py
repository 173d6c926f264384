"""When a worker is given no more requests of a deployment, and when again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from daskinfer.fields import given_duration, size


@dataclass(frozen=True)
class BreakerPolicy:
    """When a worker is taken out of service for a deployment, and for how long.

    Each worker has a circuit breaker for each deployment. Closed, it is given batches.
    Failures of the worker open it, and its requests go elsewhere. After a while it is
    half-open: one request is sent to see. It closes if that is answered; if not, it
    stays open for twice as long. Errors of the inputs do not count.

    Parameters
    ----------
    failures : int
        It opens after so many failures of the worker ...
    window : str, float or timedelta
        ... within so many seconds (or ``"30s"``). A batch past its time limit opens it
        at once.
    cooldown : str, float or timedelta
        How long it stays open at first.
    max_cooldown : str, float or timedelta
        The longest that it stays open before the next try.

    Raises
    ------
    TypeError, ValueError
        A field is wrong; the message names it.

    Notes
    -----
    Immutable, so it can be shared between threads.

    Examples
    --------
    >>> BreakerPolicy(cooldown="500ms").cooldown
    0.5
    >>> BreakerPolicy(failures=0)
    Traceback (most recent call last):
        ...
    ValueError: failures must be at least 1, got 0
    """

    failures: int = 3
    window: float = 30.0
    cooldown: float = 5.0
    max_cooldown: float = 120.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "failures", size("failures", self.failures))
        for field in ("window", "cooldown", "max_cooldown"):
            seconds = given_duration(field, getattr(self, field), above_zero=True)
            object.__setattr__(self, field, seconds)
        if self.cooldown > self.max_cooldown:
            raise ValueError(
                f"cooldown is {self.cooldown:g} s, above max_cooldown, which is "
                f"{self.max_cooldown:g} s"
            )

    def to_message(self) -> dict[str, Any]:
        """As plain data.

        >>> BreakerPolicy(**BreakerPolicy().to_message()) == BreakerPolicy()
        True
        """
        return asdict(self)
