"""Deployments as the configuration names them, below ``daskinfer.deployments``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskinfer.breaker import BreakerPolicy
from daskinfer.cache.policy import TierPolicy
from daskinfer.caching import CachePolicy
from daskinfer.names import check_name
from daskinfer.planning import Plan, plan_of
from daskinfer.policy import BatchPolicy
from daskinfer.retry import RetryPolicy
from daskinfer.streaming import StreamPolicy


def plan_of_entry(name: object, entry: object) -> Plan:
    """Make ready what an entry of the configuration asks for.

    Parameters
    ----------
    name
        What it is called.
    entry
        The fields of :func:`daskinfer.deploy` in kebab case, with mappings for the
        policies. One of ``factory`` and ``path`` says what to deploy; the file is read
        here.

    Raises
    ------
    TypeError, ValueError
        A field is wrong, or there is no such field.
    OSError
        The file cannot be read.

    Examples
    --------
    >>> plan = plan_of_entry(
    ...     "scorer",
    ...     {"factory": "torch.nn:Identity", "batching": {"max-batch-size": 8}},
    ... )
    >>> plan.name, plan.policy.max_batch_size
    ('scorer', 8)
    >>> plan_of_entry("scorer", {"factory": "torch.nn:Identity", "cache": {"size": 1}})
    Traceback (most recent call last):
        ...
    ValueError: cache has no field size; there are affinity, disk, host, packed
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"its name must be a text that is not empty, not {name!r}")
    check_name("its name", name)
    fields = _fields("it", entry, _FIELDS)
    if (fields.get("factory") is None) == (fields.get("path") is None):
        raise ValueError("it must have one of the fields factory and path")
    for field, read in _POLICIES.items():
        if fields.get(field) is not None:
            fields[field] = read(fields[field])
    return plan_of(name=name, **fields)


def _fields(what: str, entry: object, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise TypeError(f"{what} must be a mapping of fields, not {entry!r}")
    found = {str(key).replace("-", "_"): value for key, value in entry.items()}
    unknown = sorted(found.keys() - known)
    if unknown:
        raise ValueError(
            f"{what} has no field {', '.join(map(_kebab, unknown))}; there are "
            f"{', '.join(map(_kebab, sorted(known)))}"
        )
    return found


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _batching(value: object) -> BatchPolicy:
    return BatchPolicy(**_fields("batching", value, _names(BatchPolicy)))


def _breaker(value: object) -> BreakerPolicy:
    return BreakerPolicy(**_fields("breaker", value, _names(BreakerPolicy)))


def _retry(value: object) -> RetryPolicy:
    fields = _fields("retry", value, _names(RetryPolicy))
    try:
        return RetryPolicy.from_message({"retry_on": None, **fields})
    except KeyError as error:
        raise ValueError(f"retry-on names an unknown error: {error}") from None


def _cache(value: object) -> CachePolicy | None:
    if isinstance(value, bool):
        return CachePolicy() if value else None
    fields = _fields("cache", value, _names(CachePolicy))
    tiers = {
        tier: limits and _tier(tier, limits)
        for tier, limits in fields.items()
        if tier != "affinity"
    }
    return CachePolicy(**{**fields, **tiers})


def _streaming(value: object) -> StreamPolicy:
    return StreamPolicy(**_fields("streaming", value, _names(StreamPolicy)))


def _tier(tier: str, value: object) -> TierPolicy:
    limits = _fields(f"cache.{tier}", value, frozenset(("size", "ttl")))
    if "size" not in limits:
        raise ValueError(f"cache.{tier} must have a size")
    return TierPolicy(limits["size"], limits.get("ttl"))


def _names(policy: Any) -> frozenset[str]:
    return frozenset(policy.__dataclass_fields__)


_POLICIES: dict[str, Callable[[object], Any]] = {
    "batching": _batching,
    "breaker": _breaker,
    "cache": _cache,
    "retry": _retry,
    "streaming": _streaming,
}

_FIELDS = frozenset(
    (
        *("factory", "factory_kwargs", "path", "trusted"),
        *("version", "device", "resources", "placement"),
        *("request_timeout", "batch_timeout", "max_queue", "keep_loaded"),
        *_POLICIES,
    )
)
