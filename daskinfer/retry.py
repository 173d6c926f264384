"""What a user may ask for after failures of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

from daskinfer.exceptions import BatchTimeout, DeviceError, RequestFailed, WorkerLost
from daskinfer.fields import given_duration, size

_RETRYABLE = {kind.__name__: kind for kind in (BatchTimeout, DeviceError, WorkerLost)}


@dataclass(frozen=True)
class RetryPolicy:
    """How often requests are tried again after failures of the engine.

    Only what the engine itself causes or sees is retried: a worker that died, a batch
    past its time, a broken device. A model's own exception never is; an explicit
    ``retries=`` of a call is for that.

    Parameters
    ----------
    max_attempts : int
        A request fails after so many attempts that ended by such failures while it
        was really running. With 1 it is tried again only to find out, after the loss
        of a worker or device, which request of its batch was the cause; see Notes.
    backoff : str, float or timedelta
        Seconds (or ``"50ms"``) to wait before the first retry; doubled each time.
        After the loss of a worker nothing is waited for.
    max_backoff : str, float or timedelta
        The longest wait.
    jitter : float
        Share of the wait, between 0 and 1, that is left to chance.
    retry_on : iterable of types, optional
        Errors such as :class:`~daskinfer.WorkerLost` to try again after; None: all
        that are retryable.

    Raises
    ------
    TypeError, ValueError
        A field is wrong; the message names it.

    Notes
    -----
    Immutable, so it can be shared between threads.

    When a worker dies, its batch is run again in parts until the cause is alone,
    whatever the policy says: everybody else in the batch is to be answered. The
    policy decides about a request that was alone.

    Examples
    --------
    >>> RetryPolicy(backoff="20ms").backoff
    0.02
    >>> RetryPolicy(retry_on=[ValueError])
    Traceback (most recent call last):
        ...
    ValueError: retry_on holds ValueError, which is none of the engine's retryable \
errors: BatchTimeout, DeviceError, WorkerLost
    """

    max_attempts: int = 3
    backoff: float = 0.05
    max_backoff: float = 2.0
    jitter: float = 0.5
    retry_on: tuple[type[RequestFailed], ...] | None = None

    def __post_init__(self) -> None:
        jitter = self.jitter
        if isinstance(jitter, bool) or not isinstance(jitter, Real):
            raise TypeError(f"jitter must be a number from 0 to 1, got {jitter!r}")
        if not 0 <= jitter <= 1:
            raise ValueError(f"jitter must be a number from 0 to 1, got {jitter!r}")
        for field, value in (
            ("max_attempts", size("max_attempts", self.max_attempts)),
            ("backoff", given_duration("backoff", self.backoff)),
            ("max_backoff", given_duration("max_backoff", self.max_backoff)),
            ("jitter", float(jitter)),
            ("retry_on", _retryable("retry_on", self.retry_on)),
        ):
            object.__setattr__(self, field, value)
        if self.backoff > self.max_backoff:
            raise ValueError(
                f"backoff is {self.backoff:g} s, above max_backoff, which is "
                f"{self.max_backoff:g} s"
            )

    def retries(self, kind: type[RequestFailed]) -> bool:
        """Whether failures of a kind are tried again.

        >>> RetryPolicy().retries(WorkerLost)
        True
        """
        return kind.retryable and (
            self.retry_on is None or issubclass(kind, self.retry_on)
        )

    def to_message(self) -> dict[str, Any]:
        """As plain data."""
        message = asdict(self)
        if self.retry_on is not None:
            message["retry_on"] = [kind.__name__ for kind in self.retry_on]
        return message

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> RetryPolicy:
        """Rebuild from what :meth:`to_message` gave.

        >>> policy = RetryPolicy(retry_on=[WorkerLost])
        >>> RetryPolicy.from_message(policy.to_message()) == policy
        True
        """
        names = message["retry_on"]
        kinds = None if names is None else tuple(_RETRYABLE[name] for name in names)
        return cls(**{**message, "retry_on": kinds})


def _retryable(field: str, kinds: object) -> tuple[type[RequestFailed], ...] | None:
    if kinds is None:
        return None
    listed = [kinds] if isinstance(kinds, type) else kinds
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise TypeError(f"{field} must be a list of error types, got {kinds!r}")
    found = tuple(listed)
    for kind in found:
        if kind not in _RETRYABLE.values():
            told = kind.__name__ if isinstance(kind, type) else repr(kind)
            raise ValueError(
                f"{field} holds {told}, which is none of the engine's retryable "
                f"errors: {', '.join(_RETRYABLE)}"
            )
    return found
