"""Reading the fields of what a user sets; an error names the field.

Every function raises :class:`TypeError` for a value of the wrong type, and
:class:`ValueError` for one that is out of range.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from datetime import timedelta
from numbers import Real

from dask.utils import parse_timedelta


def integer(field: str, value: object) -> int:
    """Read a whole number."""
    if isinstance(value, bool):
        raise TypeError(f"{field} must be an integer, got {value!r}")
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{field} must be an integer, got {value!r}") from None


def size(field: str, value: object) -> int:
    """Read a whole number of at least 1."""
    number = integer(field, value)
    if number < 1:
        raise ValueError(f"{field} must be at least 1, got {number}")
    return number


def sizes(field: str, values: object) -> tuple[int, ...] | None:
    """Read a list of such numbers, sorted and without duplicates."""
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{field} must be a list of integers, got {values!r}")
    found = tuple(sorted({size(field, value) for value in values}))
    if not found:
        raise ValueError(f"{field} must not be empty; leave it out to allow any size")
    return found


def number_within(field: str, value: object, low: float, high: float) -> float:
    """Read a number between two others, which are allowed.

    >>> number_within("share", 1, 0, 1)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{field} must be a number, got {value!r}")
    found = float(value)
    if not low <= found <= high:
        span = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{field} must be {span}, got {value!r}")
    return found


def duration(field: str, value: object) -> float | None:
    """Read a time that a user gave, in seconds or as a text with its unit.

    Raises
    ------
    TypeError, ValueError
        If it is none, is negative or has no end. The message names the field.

    Examples
    --------
    >>> duration("timeout", "50ms"), duration("timeout", None)
    (0.05, None)
    """
    seconds = _seconds(field, value)
    if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{field} must be finite and not negative, got {value!r}")
    return seconds


def timeout_of(field: str, value: object) -> float | None:
    """Read a time that must be above 0.

    >>> timeout_of("timeout", "-1s")
    Traceback (most recent call last):
        ...
    ValueError: timeout must be above 0, got '-1s'
    """
    seconds = _seconds(field, value)
    if seconds is not None and seconds <= 0:
        raise ValueError(f"{field} must be above 0, got {value!r}")
    return duration(field, value)


def given_duration(field: str, value: object, *, above_zero: bool = False) -> float:
    """Read a time that must not be left out."""
    seconds = (timeout_of if above_zero else duration)(field, value)
    if seconds is None:
        raise TypeError(f"{field} must be a duration, got None")
    return seconds


def _seconds(field: str, value: object) -> float | None:
    """Read a time of either sign."""
    if value is None:
        return None
    wanted = f'{field} must be seconds or a string such as "5ms", got {value!r}'
    if isinstance(value, bool) or not isinstance(value, str | int | float | timedelta):
        raise TypeError(wanted)
    try:
        if isinstance(value, str):
            # Dask's parser knows no sign.
            text = value.strip()
            sign = -1.0 if text.startswith("-") else 1.0
            return sign * float(parse_timedelta(text.removeprefix("-")))
        return float(value.total_seconds() if isinstance(value, timedelta) else value)
    except (ValueError, KeyError, IndexError, OverflowError):
        raise ValueError(wanted) from None
