"""Many threads on one cache."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskinfer.cache import TieredCache, TierPolicy
from tests.cache.helpers import cache_of, room_for, same

VALUE = np.random.default_rng(0).random(300)


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            gate.wait(60)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "threads wait for each other"
    if errors:
        raise errors[0]


def small(directory: Path) -> TieredCache:
    """Tiers of which each holds fewer than the keys that are used."""
    return cache_of(
        directory=directory,
        tiers={
            "host": TierPolicy(room_for(3, VALUE), 0.01),
            "packed": TierPolicy(room_for(4, VALUE), 0.02),
            "disk": TierPolicy(10 * 4096, 5),
        },
    )


def test_anything_at_once(tmp_path: Path) -> None:
    """A value is the one last put, while each key has one thread that puts it."""
    cache = small(tmp_path)
    counts = [0] * 6

    def work(number: int) -> None:
        drawn = random.Random(number)
        last: dict[str, int] = {}
        for step in range(600):
            key = f"{number} {drawn.randrange(4)}"
            action = drawn.random()
            if action < 0.35:
                cache.put(key, [step, VALUE + step])
                last[key] = step
            elif action < 0.4:
                cache.delete(key)
                last.pop(key, None)
            elif action < 0.42:
                cache.shrink(0.3)
            elif action < 0.44:
                cache.sweep()
            elif action < 0.46:
                cache.flush()
            else:
                found = cache.get(key, default=None)
                counts[number] += 1
                if found is not None:
                    assert found[0] == last[key]
                    assert same(found[1], VALUE + found[0])
            # Others' keys: whole values only.
            other = cache.get(f"{drawn.randrange(6)} {drawn.randrange(4)}")
            counts[number] += 1
            if other is not None:
                assert same(other[1], VALUE + other[0])

    in_threads(6, work)
    statistics = cache.stats()
    assert statistics.hits + statistics.misses == sum(counts)
    assert statistics.hits == sum(tier.hits for tier in statistics.tiers) > 0
    for upper, lower in zip(statistics.tiers, statistics.tiers[1:], strict=False):
        assert upper.misses == lower.hits + lower.misses
    assert all(0 <= tier.nbytes <= tier.budget for tier in statistics.tiers)
    cache.clear()
    assert all(tier.nbytes == tier.entries == 0 for tier in cache.stats().tiers)


def test_threads_that_bring_up_the_same_entry_all_find_it(tmp_path: Path) -> None:
    cache = cache_of("host", "packed", "disk", directory=tmp_path)

    def work(number: int) -> None:
        for step in range(200):
            if number == 0:
                cache.shrink(1.0)  # down to the disk again
            assert same(cache.get("key", default=None), VALUE), step

    cache.put("key", VALUE)
    in_threads(4, work)
    assert cache.stats().misses == 0


def test_threads_that_put_one_key_leave_one_of_their_values(tmp_path: Path) -> None:
    cache = small(tmp_path)

    def work(number: int) -> None:
        for step in range(200):
            cache.put("key", [number, step, VALUE], tier=("host", "disk")[step % 2])
            cache.get("key")

    in_threads(4, work)
    found = cache.get("key")
    assert found[1] >= 198
    cache.close()


def test_a_slow_write_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from daskinfer.cache.files import Files

    writing, go_on = threading.Event(), threading.Event()
    write = Files.write

    def slow_write(self: Files, *args: Any, **kwargs: Any) -> None:
        writing.set()
        assert go_on.wait(60)
        write(self, *args, **kwargs)

    monkeypatch.setattr(Files, "write", slow_write)
    cache = cache_of("host", "packed", "disk", directory=tmp_path)
    for number in range(20):
        cache.put(str(number), VALUE)
    slow = threading.Thread(target=cache.put, args=("slow", VALUE, "disk"), daemon=True)
    slow.start()
    assert writing.wait(60)
    # But for one in 256, whose key shares the lock.
    found = []

    def read() -> None:
        found.extend(cache.get(str(number)) for number in range(20))
        cache.put("another", VALUE)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    assert all(same(value, VALUE) for value in found)
    go_on.set()
    slow.join(60)
    assert same(cache.get("slow"), VALUE)
