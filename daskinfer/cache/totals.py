"""What can be known of a deployment's cached results, over all workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from daskinfer.cache.policy import TIERS
from daskinfer.cache.statistics import CacheStatistics, TierStatistics
from daskinfer.wording import counted


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The result caches of a deployment. Printed, a few lines for a reader.

    Attributes
    ----------
    workers
        How many have told.
    results
        All their tiers, added up.
    uncacheable
        Requests whose inputs or results have no stable content, and so are not kept.
    joined
        Requests that were answered by what was computed for an equal one.
    skipped
        Requests that were not looked up because hits are too rare.
    dropped
        Results that were not kept because they came faster than they could be stored.
    resting
        Workers that do not look up at present, for that reason.
    silent
        Workers that did not answer in time.

    Examples
    --------
    >>> tier = TierStatistics("host", 3, 4096, 10485760, hits=30, misses=10)
    >>> print(CacheStatus(1, CacheStatistics((tier,), 30, 10), joined=2))
    cache of 1 worker: 40 look-ups, 75.0 % hits, 2 joined
    tier  entries  bytes     of        hits  misses  evicted  expired  promoted  refused
    host        3  4.00 kiB  10.00 MiB   30      10        0        0         0        0
    """

    workers: int
    results: CacheStatistics
    uncacheable: int = 0
    joined: int = 0
    skipped: int = 0
    dropped: int = 0
    resting: int = 0
    silent: tuple[str, ...] = ()

    def __str__(self) -> str:
        head, _, table = str(self.results).partition("\n")
        told = [head]
        told += [
            f"{getattr(self, name):,} {name}"
            for name in ("joined", "uncacheable", "skipped", "dropped")
            if getattr(self, name)
        ]
        if self.resting:
            told.append(f"{counted(self.resting, 'worker')} not looking up")
        if self.silent:
            told.append(f"no answer from {', '.join(self.silent)}")
        return f"cache of {counted(self.workers, 'worker')}: {', '.join(told)}\n{table}"

    @classmethod
    def sum(
        cls, told: Iterable[Mapping[str, Any]], silent: Iterable[str] = ()
    ) -> CacheStatus:
        """Add up what workers have told, each in plain data."""
        told = list(told)
        caches = [_read(each["tiers"]) for each in told]
        tiers = []
        for name in TIERS:
            found = [t for cache in caches for t in cache.tiers if t.name == name]
            if found:
                sums = {
                    field.name: sum(getattr(tier, field.name) for tier in found)
                    for field in fields(TierStatistics)
                    if field.name != "name"
                }
                tiers.append(TierStatistics(name, **sums))
        totals = {
            name: sum(getattr(cache, name) for cache in caches)
            for name in ("hits", "misses", "dropped")
        }
        counts = {
            name: sum(each["counts"].get(name, 0) for each in told)
            for name in ("uncacheable", "joined", "skipped", "dropped")
        }
        resting = sum(each["resting"] for each in told)
        results = CacheStatistics(tuple(tiers), **totals)
        return cls(len(told), results, **counts, resting=resting, silent=tuple(silent))

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> CacheStatus:
        """Rebuild from what :func:`dataclasses.asdict` made of one."""
        return cls(
            **{
                **message,
                "results": _read(message["results"]),
                "silent": tuple(message["silent"]),
            }
        )


def _read(message: Mapping[str, Any]) -> CacheStatistics:
    tiers = tuple(TierStatistics(**tier) for tier in message["tiers"])
    return CacheStatistics(**{**message, "tiers": tiers})
