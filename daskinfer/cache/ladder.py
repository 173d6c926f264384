"""How entries move between tiers."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from daskinfer.cache.build import build
from daskinfer.cache.clock import Clock
from daskinfer.cache.contents import isolate
from daskinfer.cache.disk import DiskTier
from daskinfer.cache.keys import CacheKey
from daskinfer.cache.policy import TIERS, TierPolicy
from daskinfer.cache.residence import to_device
from daskinfer.cache.tiers import DeviceTier, Entry, HostTier, Tier
from daskinfer.device.base import Device
from daskinfer.failure import origin
from daskinfer.logs import Log

logger = Log("cache")

#: One for each last byte of a digest.
_LOCKS = 256


#: A look-up that found nothing; None is a value like others.
MISSING: Any = object()


class Ladder:
    """The tiers, the fastest first, and every way up and down.

    Each change of a key's entry, in whatever tier, is made under the lock of that key,
    and nobody who holds one waits for another. So one key has one value at any time,
    while others are read, packed or written.

    :class:`zict.Buffer` joins two mappings likewise, but fails where the lower one
    cannot take something, takes a file away when a hit brings its entry up, and lets
    one of two threads that bring up the same entry find nothing.

    Parameters
    ----------
    wanted, device, directory, clock
        As :func:`build` takes them.
    copy
        Whether what is found in memory is copied for the caller.
    """

    def __init__(
        self,
        wanted: Mapping[str, TierPolicy],
        device: Device | None,
        directory: str | Path | None,
        clock: Clock,
        copy: bool,
    ) -> None:
        self.clock = clock
        self._device = device
        self._copy = copy
        self._locks = tuple(threading.RLock() for _ in range(_LOCKS))
        self.tiers = build(wanted, device, directory, clock, self._go_down)
        self._ways_down = {
            tier.name: (tier, self.tiers[place + 1 :])
            for place, tier in enumerate(self.tiers)
        }
        # Seconds after which an entry ends, wherever it is.
        self._lifetime = self.tiers[-1].policy.seconds if self.tiers else math.inf

    def __repr__(self) -> str:
        held = ", ".join(f"{tier.name}: {len(tier)}" for tier in self.tiers)
        return f"<Ladder {held or 'without tiers'}>"

    @property
    def disk(self) -> DiskTier | None:
        """The disk's tier, if there is one."""
        last = self.tiers[-1] if self.tiers else None
        return last if isinstance(last, DiskTier) else None

    @property
    def memory(self) -> tuple[Tier, ...]:
        """All others."""
        return tuple(tier for tier in self.tiers if tier is not self.disk)

    def among(self, names: Iterable[str] | None) -> tuple[Tier, ...]:
        """Those of the tiers that are named; all for None."""
        if names is None:
            return self.tiers
        if isinstance(names, str):
            raise TypeError(f"tiers must be names of tiers, as in ({names!r},)")
        wanted = set(names)
        for name in wanted:
            _check(name)
        return tuple(tier for tier in self.tiers if tier.name in wanted)

    def down_from(self, name: str) -> tuple[Tier, ...]:
        """The tier that is named, which need not be there, and those below it."""
        _check(name)
        return self.among(TIERS[TIERS.index(name) :])

    def lock(self, digest: bytes) -> threading.RLock:
        """The lock of a key; of others too, but few."""
        return self._locks[digest[-1]]

    def look_up(self, key: CacheKey, chosen: tuple[Tier, ...]) -> Any:
        """Return a value from some of the tiers, and bring it up among them.

        Returns
        -------
        Any
            The caller's own value; ``MISSING`` if there is none.
        """
        now = self.clock.monotonic()
        movable = self._movable(chosen)
        with self.lock(key.digest):
            for place, tier in enumerate(chosen):
                if tier in movable and tier.ages.outlived(key.digest, now):
                    tier.evict(key.digest, "expirations")
                entry = tier.find(key)
                if entry is not None and now - entry.born >= self._lifetime:
                    self._discard(key.digest)
                    tier.counts.add("expirations")
                    entry = None
                value = MISSING
                if entry is not None:
                    value = self._take(entry, tier, chosen[:place])
                tier.counts.add("misses" if value is MISSING else "hits")
                if value is not MISSING:
                    break
            else:
                return MISSING
        # What was brought up may have to make room.
        self.trim(movable)
        return value

    def _movable(self, chosen: tuple[Tier, ...]) -> tuple[Tier, ...]:
        """The tiers that entries may go down from without leaving those chosen.

        A look-up that is kept from the disk must not write to it either: the lowest
        of its tiers may be too full until something is put.
        """
        if not chosen or chosen[-1] is self.tiers[-1]:
            return self.tiers
        return self.tiers[: self.tiers.index(chosen[-1])]

    def _take(self, entry: Entry, tier: Tier, above: tuple[Tier, ...]) -> Any:
        """Bring an entry up, and return its value for the caller."""
        try:
            live = entry.live()
        except Exception as error:  # a class that is gone, or its own code
            logger.info("A cached value cannot be restored: %s", origin(error))
            self._discard(entry.key.digest)
            return MISSING
        shared = isinstance(tier, DeviceTier | HostTier)
        for higher in above:
            if higher.wants(live) and higher.admit(live):
                higher.counts.add("promotions")
                if not isinstance(tier, DiskTier):
                    tier.discard(entry.key.digest)
                shared |= isinstance(higher, HostTier)
                break
        try:
            value = isolate(live.value) if shared and self._copy else live.value
            if live.marked and not isinstance(tier, DeviceTier):
                value = to_device(value, self._device)
            return value
        except Exception as error:  # there is no memory for it
            logger.info("A cached value cannot be copied: %s", origin(error))
            return MISSING

    def put(
        self, key: CacheKey, entry: Entry | None, tiers: Iterable[Tier]
    ) -> str | None:
        """Replace a key's value; the name of the tier that took it, if one did."""
        with self.lock(key.digest):
            # The old value is wrong from now on, even if the new one finds no place.
            self._discard(key.digest)
            return None if entry is None else self._place(entry, tiers)

    def discard(self, digest: bytes) -> bool:
        """Remove a key from all tiers; whether it was there."""
        with self.lock(digest):
            return self._discard(digest)

    def write(self, tier: Tier, digest: bytes) -> None:
        """Write an entry of a tier to disk, and leave it in its tier."""
        with self.lock(digest):
            entry = _given(tier, tier.peek(digest))
            if entry is not None and self.disk is not None:
                self.disk.admit(entry)

    def sweep(self, now: float, limit: float = math.inf) -> int:
        """Move down what has outlived its time; how many."""
        moved = 0
        for tier in self.tiers:
            while moved < limit:
                digest = tier.ages.overdue(now)
                if digest is None:
                    break
                with self.lock(digest):
                    if tier.ages.outlived(digest, now):
                        tier.evict(digest, "expirations")
                moved += 1
        return moved

    def trim(self, tiers: Iterable[Tier] | None = None) -> None:
        """Bring tiers within their budgets; all if left out."""
        for tier in self.tiers if tiers is None else tiers:
            while tier.is_full and self.evict_oldest(tier):
                pass

    def evict_oldest(self, tier: Tier) -> bool:
        """Move down what a tier has not used for longest; whether there was any."""
        digest = tier.oldest()
        if digest is None:
            return False
        with self.lock(digest):
            tier.evict(digest, "evictions")
        return True

    def _place(self, entry: Entry, tiers: Iterable[Tier]) -> str | None:
        for tier in tiers:
            if not tier.wants(entry):
                continue
            if tier.admit(entry):
                return tier.name
            tier.counts.add("refused")
        return None

    def _go_down(self, name: str, digest: bytes, entry: Entry) -> None:
        if self.clock.monotonic() - entry.born >= self._lifetime:
            return
        tier, below = self._ways_down[name]
        given = _given(tier, entry)
        if given is not None:
            self._place(given, below)

    def _discard(self, digest: bytes) -> bool:
        return any([tier.discard(digest) for tier in self.tiers])


def _given(tier: Tier, entry: Entry | None) -> Entry | None:
    try:
        return None if entry is None else tier.give(entry)
    except Exception as error:  # the device is gone
        logger.warning("A cached value on the device is lost: %s", origin(error))
        return None


def _check(name: str) -> None:
    if name not in TIERS:
        raise ValueError(f"no tier {name!r}; there are {', '.join(TIERS)}")
