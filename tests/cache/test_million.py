"""Unique entries without end: bytes and memory stay where they are."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from daskinfer.cache import TieredCache, TierPolicy
from tests.cache.helpers import cache_of

PROCESS = psutil.Process()
MEBI = 2**20


@pytest.mark.parametrize(
    "count", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_unique_entries_take_no_more_than_the_budgets(count: int) -> None:
    cache = cache_of(
        tiers={"host": TierPolicy(2 * MEBI, "1h"), "packed": TierPolicy(8 * MEBI, "2h")}
    )
    value = np.zeros((1, 10), "f4")

    def fill(first: int, last: int) -> int:
        for number in range(first, last):
            assert cache.put(f"{number:032}", value) == "host"
            if not number % 10_000:
                assert_within(cache)
        gc.collect()
        return PROCESS.memory_info().rss

    full = fill(0, count // 4)
    end = fill(count // 4, count)
    assert_within(cache)
    assert cache.stats()["packed"].evictions > count / 2
    # As much as the tiers may hold: it can be fragmented, but it must not grow.
    assert end - full < 10 * MEBI


def test_what_is_counted_for_an_entry_is_what_it_takes() -> None:
    """However small the values are, memory stays near the budgets."""
    cache = cache_of(tiers={"packed": TierPolicy(1 << 40, "1h")})
    value = np.zeros((1, 10), "f4")
    gc.collect()
    before = PROCESS.memory_info().rss
    for number in range(50_000):
        cache.put(f"{number:032}", value)
    gc.collect()
    taken = PROCESS.memory_info().rss - before
    assert 0.5 < cache.stats().nbytes / taken < 2


@pytest.mark.parametrize("count", [2_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_files_take_no_more_than_their_budget(count: int, tmp_path: Path) -> None:
    cache = cache_of(
        directory=tmp_path,
        tiers={"host": TierPolicy(20_000), "disk": TierPolicy(MEBI, "1h")},
    )
    for number in range(count):
        cache.put(str(number), np.full(100, number))
        if not number % 500:
            assert_within(cache)
    sizes = [
        entry.stat().st_blocks * 512 for entry in os.scandir(cache_folder(tmp_path))
    ]
    assert 0 < sum(sizes) <= MEBI
    assert len(sizes) == cache.stats()["disk"].entries


def cache_folder(directory: Path) -> Path:
    (folder,) = directory.iterdir()
    return folder


def assert_within(cache: TieredCache) -> None:
    for tier in cache.stats().tiers:
        assert 0 <= tier.nbytes <= tier.budget
