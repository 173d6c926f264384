"""Whether a deployment's results are cached, and how much of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from daskinfer.cache.policy import TierPolicy

#: What a tier is as long as nobody says otherwise: as the configuration has it.
_CONFIGURED: Literal["configured"] = "configured"

#: The tiers that results are kept in.
_TIERS = ("host", "packed", "disk")


@dataclass(frozen=True)
class CachePolicy:
    """Cache the results of a deployment, on each worker.

    Before the forward pass a worker looks up whether it has answered the same request:
    the same inputs to the same weights. Only the others go to the device.

    Parameters
    ----------
    host, packed, disk : TierPolicy or None
        The limits of each tier, for this deployment on each worker; None leaves the
        tier out. By default as ``daskinfer.cache`` in the worker's configuration has
        them; there is a disk tier only where ``daskinfer.cache.directory`` is set.
        Results are on the host when they are complete, so none is on the device.
    affinity : bool
        Whether requests are sent to a worker that has their result, if that is
        faster than computing it elsewhere.

    Raises
    ------
    TypeError
        A field is wrong; the message names it.

    Notes
    -----
    Immutable, so it can be shared between threads.

    Examples
    --------
    >>> policy = CachePolicy(host=TierPolicy("64 MiB", "10m"), packed=None)
    >>> policy.tiers()
    {'host': TierPolicy(nbytes=67108864, ttl=600.0), 'packed': None}
    >>> CachePolicy(host="64 MiB")
    Traceback (most recent call last):
        ...
    TypeError: host must be a TierPolicy or None, got '64 MiB'
    """

    host: TierPolicy | Literal["configured"] | None = _CONFIGURED
    packed: TierPolicy | Literal["configured"] | None = _CONFIGURED
    disk: TierPolicy | Literal["configured"] | None = _CONFIGURED
    affinity: bool = True

    def __post_init__(self) -> None:
        for name in _TIERS:
            value = getattr(self, name)
            if value not in (_CONFIGURED, None) and not isinstance(value, TierPolicy):
                raise TypeError(f"{name} must be a TierPolicy or None, got {value!r}")
        if not isinstance(self.affinity, bool):
            raise TypeError(f"affinity must be True or False, got {self.affinity!r}")

    def tiers(self) -> dict[str, TierPolicy | None]:
        """The tiers that differ from the configuration."""
        given = {name: getattr(self, name) for name in _TIERS}
        return {name: value for name, value in given.items() if value != _CONFIGURED}

    def to_message(self) -> dict[str, Any]:
        """As plain data.

        >>> policy = CachePolicy(disk=None, host=TierPolicy(1024))
        >>> CachePolicy.from_message(policy.to_message()) == policy
        True
        """
        message: dict[str, Any] = {
            name: value and [value.nbytes, value.ttl]
            for name, value in self.tiers().items()
        }
        return {**message, "affinity": self.affinity}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> CachePolicy:
        """Rebuild from plain data."""
        tiers: dict[str, Any] = {
            name: message[name] and TierPolicy(*message[name])
            for name in _TIERS
            if name in message
        }
        return cls(**tiers, affinity=message["affinity"])
