"""Whatever is done in whatever order: budgets hold, and values are right or missing."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daskinfer.cache import CacheKey, TieredCache, TierPolicy
from tests.cache.helpers import FakeClock, Opaque, room_for, same

NAMES = ("host", "packed", "disk")
KEYS = st.sampled_from("abcdefgh")
VALUE = np.random.default_rng(0).random(300)


class CacheMachine(RuleBasedStateMachine):
    """A cache against a dict of what was put last, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = FakeClock()
        self.model: dict[str, tuple[Any, float]] = {}
        self.tiers = {
            "host": TierPolicy(room_for(2.5, VALUE), 10),
            "packed": TierPolicy(room_for(2.5, VALUE), 40),
            "disk": TierPolicy(4 * 4096, 160),
        }
        self.number = 0
        self.start()

    def start(self) -> None:
        self.cache = TieredCache(
            self.folder.name, tiers={"device": None, **self.tiers}, clock=self.clock
        )
        self.gets = self.hits = self.dropped = 0

    def teardown(self) -> None:
        self.cache.close()
        self.folder.cleanup()

    @rule(
        key=KEYS,
        size=st.sampled_from([0, 10, 300, 300, 1000, 10_000]),
        kind=st.sampled_from(["plain", "plain", "opaque"]),
        tier=st.none() | st.sampled_from(NAMES),
    )
    def put(self, key: str, size: int, kind: str, tier: str | None) -> None:
        self.number += 1
        array = np.random.default_rng(self.number).random(size)
        value = [self.number, array if kind == "plain" else Opaque(array.tolist())]
        place = self.cache.put(key, value, tier=tier)
        if place is None:
            self.dropped += 1
            self.model.pop(key, None)
            # Never because of others: only what no tier from there on can hold.
            assert size == 10_000 or (
                kind == "opaque" and (size > 300 or tier == "disk")
            )
        else:
            assert NAMES.index(place) >= (NAMES.index(tier) if tier else 0)
            self.model[key] = (value, self.clock.now)

    @rule(key=KEYS, tiers=st.none() | st.lists(st.sampled_from(NAMES)))
    def get(self, key: str, tiers: list[str] | None) -> None:
        before = self.cache.stats()
        found = self.cache.get(key, tiers=tiers, default="missing")
        self.gets += 1
        if found == "missing":
            if tiers is None:
                self.model.pop(key, None)  # and it must not come back
        else:
            self.hits += 1
            value, born = self.model[key]
            assert same(found, value)
            assert self.clock.now - born < 160
            where = [
                t.name for t in before.tiers if self.cache.stats()[t.name].hits > t.hits
            ]
            assert len(where) == 1
            assert tiers is None or where[0] in tiers
        if tiers is not None and "disk" not in tiers:
            # Without waiting for the disk, which may leave a tier too full.
            after = self.cache.stats()
            assert after["disk"] == before["disk"]
            if after["packed"].nbytes > after["packed"].budget:
                assert after["packed"].nbytes <= after["packed"].budget + 9000
            self.cache.sweep()

    @rule(key=KEYS)
    def get_at_once(self, key: str) -> None:
        """What was put and fits is found at once."""
        value = [key, VALUE]
        assert self.cache.put(key, value) == "host"
        self.model[key] = (value, self.clock.now)
        assert same(self.cache.get(key), value)
        self.gets, self.hits = self.gets + 1, self.hits + 1

    @rule(key=KEYS)
    def collide(self, key: str) -> None:
        crafted = CacheKey(CacheKey.of(key).digest, b"another")
        assert self.cache.get(crafted, default="missing") == "missing"
        self.gets += 1

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        there = self.cache.delete(key)
        assert key in self.model or not there
        self.model.pop(key, None)

    @rule(
        seconds=st.sampled_from([1, 9, 10, 30, 40, 100, 160]), jump=st.floats(-1e5, 1e5)
    )
    def wait(self, seconds: int, jump: float) -> None:
        self.clock.advance(seconds)
        self.clock.date += jump

    @rule()
    def sweep(self) -> None:
        self.cache.sweep()
        deadline = self.cache.next_deadline()
        assert deadline is None or deadline > self.clock.now

    @rule(amount=st.sampled_from([0.0, 0.3, 1.0, 1, 4000, "1 MiB"]))
    def shrink(self, amount: float | str) -> None:
        before = sum(self.cache.stats()[name].nbytes for name in NAMES[:2])
        freed = self.cache.shrink(amount)
        after = sum(self.cache.stats()[name].nbytes for name in NAMES[:2])
        assert freed == before - after
        wanted = {"1 MiB": 2**20}.get(amount, amount)  # type: ignore[call-overload]
        if isinstance(wanted, float):
            wanted = math.ceil(wanted * before)
        assert freed >= min(before, wanted)

    @rule()
    def flush(self) -> None:
        self.cache.flush()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.stats().entries == 0
        self.model.clear()

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        if cleanly:
            self.cache.close()
        self.start()

    @invariant()
    def budgets_hold_and_counts_add_up(self) -> None:
        statistics = self.cache.stats()
        for tier in statistics.tiers:
            assert 0 <= tier.nbytes <= tier.budget
            assert (tier.nbytes == 0) == (tier.entries == 0)
        assert statistics.hits + statistics.misses == self.gets
        assert statistics.hits == self.hits == sum(t.hits for t in statistics.tiers)
        assert statistics.dropped == self.dropped
        promoted = statistics["host"].promotions + statistics["packed"].promotions
        assert promoted <= statistics.hits


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
