"""How large a tier may grow, and how long it keeps what is not used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dask.utils import parse_bytes

from daskinfer import config, fields

#: From the fastest to the largest. Entries go down this list and hits bring them up.
TIERS = ("device", "host", "packed", "disk")


@dataclass(frozen=True)
class TierPolicy:
    """The limits of one tier.

    Parameters
    ----------
    nbytes : int or str
        What it may hold, in bytes or as ``"10 MiB"``; 0: there is no such tier.
    ttl : str, float or timedelta, optional
        How long an entry stays after it was last used there, in seconds or as
        ``"5m"``; then it goes down. In the last tier, how long after it was put it is
        removed, wherever it is. None sets no limit.

    Raises
    ------
    TypeError, ValueError
        A field has the wrong type or is out of range; the message names it.

    Examples
    --------
    >>> TierPolicy("10 MiB", "5m")
    TierPolicy(nbytes=10485760, ttl=300.0)
    """

    nbytes: int
    ttl: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", _size("nbytes", self.nbytes))
        object.__setattr__(self, "ttl", fields.timeout_of("ttl", self.ttl))

    @property
    def seconds(self) -> float:
        """The time to live; infinite without a limit."""
        return math.inf if self.ttl is None else self.ttl

    @classmethod
    def configured(cls, tier: str) -> TierPolicy:
        """Return the policy that the configuration sets for a tier.

        >>> TierPolicy.configured("host")
        TierPolicy(nbytes=10485760, ttl=300.0)
        """
        return cls(
            config.nbytes(f"cache.{tier}.size"),
            config.seconds(f"cache.{tier}.ttl"),
        )


def _size(field: str, value: Any) -> int:
    wanted = f'{field} must be bytes or a string such as "10 MiB", got {value!r}'
    if isinstance(value, str):
        try:
            size = parse_bytes(value)
        except ValueError:
            raise ValueError(wanted) from None
    elif isinstance(value, bool):
        raise TypeError(wanted)
    else:
        size = fields.integer(field, value)
    if size < 0:
        raise ValueError(f"{field} must not be negative, got {value!r}")
    return int(size)


def bytes_of(amount: float | str, whole: int) -> int:
    """Read an amount of memory: bytes, a text, or as a float the share of a whole.

    Raises
    ------
    TypeError, ValueError
        It is none of these, or negative.

    Examples
    --------
    >>> bytes_of(10, 4096), bytes_of("1 kiB", 4096), bytes_of(0.25, 4096)
    (10, 1024, 1024)
    """
    wanted = f'amount must be bytes, a text such as "1 MiB" or a share, got {amount!r}'
    if isinstance(amount, bool) or not isinstance(amount, str | int | float):
        raise TypeError(wanted)
    if isinstance(amount, str):
        try:
            amount = parse_bytes(amount)
        except ValueError:
            raise ValueError(wanted) from None
    elif isinstance(amount, float):
        if not amount <= 1.0:
            raise ValueError(wanted)
        amount = math.ceil(amount * whole) if amount >= 0 else -1
    if amount < 0:
        raise ValueError(wanted)
    return int(amount)
