"""Caches in tiers, from the device to the disk; useful without a cluster too.

``tiered``
    :class:`TieredCache`: all of it, for users
``tiers``, ``disk``
    one tier each: an LRU with a budget and a time to live
``ladder``
    how entries move between tiers
``build``, ``policy``
    which tiers there are, and their limits
``ttl``
    :class:`TTL`, the mapping that knows what has outlived its time
``contents``, ``residence``
    how large values are, copies of them, and their tensors off the device and back
``packing``, ``structure``
    values to bytes and back, without pickle where they are data alone
``files``, ``records``
    whole files or none, and what is in them
``keys``, ``clock``, ``statistics``
    what entries are found by, what tells the time, what can be known
``gate``, ``totals``
    whether a cache is worth asking; what is known of many caches
"""

from __future__ import annotations

from daskinfer.cache.clock import Clock
from daskinfer.cache.keys import CacheKey
from daskinfer.cache.policy import TIERS, TierPolicy
from daskinfer.cache.statistics import CacheStatistics, TierStatistics
from daskinfer.cache.tiered import TieredCache
from daskinfer.cache.ttl import TTL

__all__ = [
    "TIERS",
    "TTL",
    "CacheKey",
    "CacheStatistics",
    "Clock",
    "TierPolicy",
    "TierStatistics",
    "TieredCache",
]
