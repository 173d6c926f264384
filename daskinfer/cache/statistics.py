"""What can be known of a cache."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields
from typing import Any

from dask.utils import format_bytes

from daskinfer.wording import counted


@dataclass(frozen=True)
class TierStatistics:
    """One tier of a cache.

    Attributes
    ----------
    name
        ``"device"``, ``"host"``, ``"packed"`` or ``"disk"``.
    entries, nbytes
        What it holds now, with what is kept about the entries.
    budget
        Bytes that it may hold.
    hits, misses
        Look-ups that reached this tier, by how they ended here.
    evictions
        Entries that made room: they went down, or were dropped by the last tier.
    expirations
        Entries that outlived their time here.
    promotions
        Entries that a hit brought up into this tier.
    refused
        Entries that it could not take and passed on: too large, of a kind that
        it cannot hold (on disk: classes that only pickle could bring back), or writing
        failed.
    """

    name: str
    entries: int
    nbytes: int
    budget: int
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    expirations: int = 0
    promotions: int = 0
    refused: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits per look-up that reached this tier; None before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None


@dataclass(frozen=True)
class CacheStatistics:
    """All of a cache. Printed, it is a table for a reader.

    Attributes
    ----------
    tiers
        One entry for each tier that there is, the fastest first.
    hits, misses
        Look-ups by how they ended.
    dropped
        Values that were put and no tier could take.

    Examples
    --------
    >>> host = TierStatistics("host", 3, 4096, 10485760, hits=30, misses=10)
    >>> disk = TierStatistics("disk", 1, 8192, 10737418240, misses=10, refused=1)
    >>> statistics = CacheStatistics((host, disk), hits=30, misses=10)
    >>> statistics.hit_rate
    0.75
    >>> print(statistics)
    40 look-ups, 75.0 % hits
    tier  entries  bytes     of        hits  misses  evicted  expired  promoted  refused
    host        3  4.00 kiB  10.00 MiB   30      10        0        0         0        0
    disk        1  8.00 kiB  10.00 GiB    0      10        0        0         0        1
    """

    tiers: tuple[TierStatistics, ...]
    hits: int = 0
    misses: int = 0
    dropped: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits per look-up; None before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None

    @property
    def entries(self) -> int:
        """Entries of all tiers; one that a hit brought up from disk counts in both."""
        return sum(tier.entries for tier in self.tiers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tiers."""
        return sum(tier.nbytes for tier in self.tiers)

    def __getitem__(self, name: str) -> TierStatistics:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    def __str__(self) -> str:
        rate = "" if self.hit_rate is None else f", {100 * self.hit_rate:.1f} % hits"
        head = f"{counted(self.hits + self.misses, 'look-up')}{rate}"
        if self.dropped:
            head += f", {counted(self.dropped, 'value')} not stored"
        if not self.tiers:
            return f"{head}\nno tiers"
        names = ["tier", "entries", "bytes", "of", "hits", "misses"]
        rows = [[*names, "evicted", "expired", "promoted", "refused"]]
        for tier in self.tiers:
            sizes = [format_bytes(tier.nbytes), format_bytes(tier.budget)]
            counts = [
                f"{getattr(tier, name):,}" for name in (*names[4:], *list(COUNTED)[2:])
            ]
            rows.append([tier.name, f"{tier.entries:,}", *sizes, *counts])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            [
                head,
                *(
                    "  ".join(
                        cell.ljust(width) if column in (0, 2, 3) else cell.rjust(width)
                        for column, (cell, width) in enumerate(
                            zip(row, widths, strict=True)
                        )
                    )
                    for row in rows
                ),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for messages and metrics."""
        return asdict(self)


#: The counts of a tier, in the order of its fields.
COUNTED = tuple(field.name for field in fields(TierStatistics))[4:]


class Counter:
    """Counts of one tier, or of a whole cache; thread-safe."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.RLock()
        self._counts = dict.fromkeys(names, 0)

    def __repr__(self) -> str:
        return f"<Counter {self.counts()}>"

    def add(self, name: str) -> None:
        """Count one more."""
        # Reading and writing back are two steps, between which threads may switch, and
        # a value's finalizer may run that uses the cache: hence a lock that one thread
        # may take twice.
        with self._lock:
            self._counts[name] += 1

    def counts(self) -> dict[str, int]:
        """All counts at one moment."""
        with self._lock:
            return dict(self._counts)
