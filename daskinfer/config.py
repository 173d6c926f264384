"""The project's part of Dask's configuration.

Importing this module adds the defaults of ``daskinfer.yaml`` to :data:`dask.config`.
Values are read where they are used, so ``dask.config.set``, a YAML file in
``~/.config/dask`` and variables such as ``DASK_DASKINFER__SEND_INTERVAL`` all work.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

DEFAULTS_FILE = Path(__file__).with_name("daskinfer.yaml")
SCHEMA_FILE = Path(__file__).with_name("daskinfer-schema.yaml")

_DURATION = "a duration such as '50ms', zero or more"


def load_defaults() -> None:
    """Add the defaults below what the user has set; harmless when repeated."""
    dask.config.ensure_file(source=str(DEFAULTS_FILE))
    dask.config.update_defaults(yaml.safe_load(DEFAULTS_FILE.read_text("utf-8")))


def get(key: str) -> Any:
    """Return the value of ``daskinfer.<key>``.

    Parameters
    ----------
    key
        The dotted key below ``daskinfer``, in kebab case.

    Raises
    ------
    KeyError
        No such key is set.

    Examples
    --------
    >>> get("placement")
    'least-loaded'
    """
    return dask.config.get(f"daskinfer.{key}")


def seconds(key: str) -> float | None:
    """Return a duration in seconds, or None where it is null.

    Raises
    ------
    ValueError
        The value is not a duration, or is negative; the message names the key.

    Examples
    --------
    >>> seconds("send-interval")
    0.0002
    >>> seconds("batching.max-wait") is None
    True
    """
    value = get(key)
    if value is None:
        return None
    if not isinstance(value, (str, int, float)) or not str(value).strip():
        raise _bad(key, value, _DURATION)
    try:
        duration = float(parse_timedelta(value))
    except (KeyError, ValueError) as error:
        raise _bad(key, value, _DURATION) from error
    if duration < 0:
        raise _bad(key, value, _DURATION)
    return duration


def given_seconds(key: str) -> float:
    """Return a duration in seconds, which must not be null.

    Raises
    ------
    ValueError
        The value is none; the message names the key.

    Examples
    --------
    >>> given_seconds("artifacts.timeout")
    30.0
    """
    duration = seconds(key)
    if duration is None:
        raise _bad(key, None, _DURATION)
    return duration


def positive_seconds(key: str) -> float:
    """Return a duration in seconds, which must be above zero.

    Raises
    ------
    ValueError
        The value is none; the message names the key.

    Examples
    --------
    >>> positive_seconds("elasticity.target-delay")
    2.0
    """
    duration = given_seconds(key)
    if duration <= 0:
        raise _bad(key, get(key), "a duration such as '50ms', above zero")
    return duration


def rate(key: str) -> float | None:
    """Return bytes per second, or None where there is no limit.

    Raises
    ------
    ValueError
        The value is not a size, or is negative; the message names the key.

    Examples
    --------
    >>> rate("artifacts.send-bandwidth") is None
    True
    """
    if get(key) is None:
        return None
    return float(nbytes(key)) or None


def nbytes(key: str) -> int:
    """Return a size in bytes.

    Raises
    ------
    ValueError
        The value is not a size, or is negative; the message names the key.

    Examples
    --------
    >>> nbytes("gather.small-limit")
    65536
    """
    value = get(key)
    wanted = "a size such as '64 KiB', zero or more"
    if not isinstance(value, (str, int, float)):
        raise _bad(key, value, wanted)
    try:
        size = parse_bytes(value)
    except ValueError as error:
        raise _bad(key, value, wanted) from error
    if size < 0:
        raise _bad(key, value, wanted)
    return size


def share_or_bytes(key: str) -> float | int | None:
    """Return a share of something, a size in bytes, or None where there is no limit.

    Returns
    -------
    float, int or None
        A share is a float above 0, and 1 at most; a size is an int.

    Raises
    ------
    ValueError
        The value is neither, or is negative; the message names the key.

    Examples
    --------
    >>> share_or_bytes("weights.device")
    0.8
    >>> with dask.config.set({"daskinfer.weights.device": "24 GiB"}):
    ...     share_or_bytes("weights.device")
    25769803776
    """
    value = get(key)
    if value is None:
        return None
    wanted = "a share above 0 and up to 1, or a size such as '24 GiB'"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and 0 < value <= 1:
        return float(value)
    if not isinstance(value, str) and not (is_number and float(value).is_integer()):
        raise _bad(key, value, wanted)
    try:
        return nbytes(key)
    except ValueError as error:
        raise _bad(key, value, wanted) from error


def integer(key: str, minimum: int = 1) -> int:
    """Return a whole number.

    Raises
    ------
    ValueError
        The value is no whole number or is below `minimum`; the message names the key.

    Examples
    --------
    >>> integer("batching.max-batch-size")
    64
    """
    value = get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise _bad(key, value, f"a whole number, {minimum} or more")
    return value


def number(key: str, minimum: float) -> float:
    """Return a number.

    Raises
    ------
    ValueError
        The value is no number or is below `minimum`; the message names the key.

    Examples
    --------
    >>> number("health.suspect-factor", minimum=1)
    20.0
    """
    value = get(key)
    wanted = f"a number, {minimum:g} or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(key, value, wanted)
    if not (math.isfinite(value) and value >= minimum):
        raise _bad(key, value, wanted)
    return float(value)


def _bad(key: str, value: object, wanted: str) -> ValueError:
    return ValueError(
        f"Configuration daskinfer.{key} is {value!r}, but must be {wanted}. "
        "See daskinfer.yaml in Dask's configuration folder, or the variable "
        f"DASK_DASKINFER__{key.upper().replace('.', '__').replace('-', '_')}."
    )


load_defaults()
