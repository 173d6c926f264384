"""Which tiers a cache has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from daskinfer import config
from daskinfer.cache.clock import Clock
from daskinfer.cache.disk import DiskTier
from daskinfer.cache.policy import TIERS, TierPolicy
from daskinfer.cache.tiers import DeviceTier, Entry, HostTier, PackedTier, Tier
from daskinfer.device.base import Device
from daskinfer.logs import Log

logger = Log("cache")

#: Folder of the disk tier, within the directory that a user gives.
FOLDER = "daskinfer-cache"


def policies(given: Mapping[str, TierPolicy | None]) -> dict[str, TierPolicy]:
    """Complete the policies that a user gives by those of the configuration.

    Raises
    ------
    TypeError, ValueError
        A tier is unknown, or its policy is none.

    Examples
    --------
    >>> list(policies({"device": None, "disk": TierPolicy(0)}))
    ['host', 'packed']
    """
    for name, policy in given.items():
        if name not in TIERS:
            raise ValueError(f"no tier {name!r}; there are {', '.join(TIERS)}")
        if policy is not None and not isinstance(policy, TierPolicy):
            raise TypeError(f"tiers[{name!r}] must be a TierPolicy, got {policy!r}")
    found = {
        name: given[name] if name in given else TierPolicy.configured(name)
        for name in TIERS
    }
    return {name: policy for name, policy in found.items() if policy and policy.nbytes}


def build(
    wanted: Mapping[str, TierPolicy],
    device: Device | None,
    directory: str | Path | None,
    clock: Clock,
    on_evict: Callable[[str, bytes, Entry], None],
) -> tuple[Tier, ...]:
    """Make the tiers that there can be.

    Parameters
    ----------
    wanted
        The policy of each tier.
    device
        None: no tier on a device.
    directory
        None: the configuration's; if that is null, no tier on disk.
    clock
        What tells the time.
    on_evict
        Called with a tier's name, a digest and its entry before the entry leaves a tier
        in memory.
    """
    disk = _open_disk(wanted.get("disk"), directory, clock)
    names = [name for name in TIERS[:-1] if name in wanted]
    if device is None and "device" in names:
        names.remove("device")
    if disk is None and not names:
        return ()
    last = wanted[names[-1]] if disk is None else disk.policy
    tiers: list[Tier] = []
    for name in names:
        policy = wanted[name]
        if policy.seconds > last.seconds:
            policy = replace(policy, ttl=last.seconds)
        make: Any = {"host": HostTier, "packed": PackedTier}.get(name)
        make = make or partial(DeviceTier, cast(Device, device))
        aging = disk is None and name == names[-1]
        tiers.append(make(name, policy, clock, partial(on_evict, name), aging=aging))
    return tuple(tiers) if disk is None else (*tiers, disk)


def _open_disk(
    policy: TierPolicy | None, directory: str | Path | None, clock: Clock
) -> DiskTier | None:
    place = config.get("cache.directory") if directory is None else directory
    if policy is None or place is None:
        return None
    try:
        return DiskTier(Path(place, FOLDER).expanduser(), policy, clock)
    except OSError as error:
        logger.warning(
            "There is no cache on disk: %s cannot be used (%s). Make it a directory "
            "that this user may write to, or set daskinfer.cache.directory to another.",
            place,
            error,
        )
        return None
