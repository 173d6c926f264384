"""What other processes do with a cache on disk."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection

import numpy as np

from daskinfer.cache import TieredCache, TierPolicy
from tests.cache.helpers import LARGE, same


def value_of(number: int) -> list[object]:
    generator = np.random.default_rng(number)
    return [number, generator.random(int(generator.integers(1, 60_000)))]


def open_cache(directory: str, budget: int = 4 * LARGE) -> TieredCache:
    tiers = dict.fromkeys(("device", "host", "packed"))
    return TieredCache(directory, tiers={**tiers, "disk": TierPolicy(budget, "1h")})


def fill(directory: str, first: int, said: Connection) -> None:
    """Put keys from `first` on until killed, and say each when it is complete."""
    cache = open_cache(directory)
    number = first
    while True:
        cache.put(str(number), value_of(number))
        said.send(number)
        number += 1


def use(directory: str, seed: int, said: Connection) -> None:
    """Put and get few keys in a budget that does not hold them all."""
    drawn = random.Random(seed)
    cache = open_cache(directory, budget=3_000_000)
    hits = 0
    for _ in range(1500):
        number = drawn.randrange(30)
        found = cache.get(str(number))
        if found is None:
            cache.put(str(number), value_of(number))
        else:
            hits += 1
            assert same(found, value_of(number))
        if drawn.random() < 0.02:
            cache.delete(str(number))
    statistics = cache.stats()["disk"]
    assert statistics.nbytes <= statistics.budget
    said.send(hits)
