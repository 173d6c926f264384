"""How entries move: down by budget and time, up by a hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.config
import numpy as np
import pytest

from daskinfer.cache import CacheKey, TieredCache, TierPolicy
from tests.cache.helpers import (
    LARGE,
    FakeClock,
    Opaque,
    cache_of,
    room_for,
    same,
)

VALUE = np.random.default_rng(0).random(500)  # does not compress


def held(cache: TieredCache) -> dict[str, int]:
    return {tier.name: tier.entries for tier in cache.stats().tiers}


def within_budgets(cache: TieredCache) -> bool:
    return all(0 <= tier.nbytes <= tier.budget for tier in cache.stats().tiers)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


# Room


def test_what_was_not_used_for_longest_goes_down() -> None:
    cache = cache_of("packed", tiers={"host": TierPolicy(room_for(2, VALUE))})
    for key in "abc":
        if key == "c":
            cache.get("a")
        assert cache.put(key, VALUE) == "host"
    assert held(cache) == {"host": 2, "packed": 1}
    assert same(cache.get("b", tiers=["packed"]), VALUE)
    assert cache.get("a", tiers=["packed"]) is None
    assert cache.stats()["host"].evictions == 1


def test_a_hit_brings_up_and_pushes_down_another(tmp_path: Path) -> None:
    room = room_for(1.5, VALUE)
    cache = cache_of(
        "disk",
        directory=tmp_path,
        tiers={"host": TierPolicy(room), "packed": TierPolicy(room)},
    )
    for key in "abc":
        cache.put(key, VALUE)
    assert held(cache) == {"host": 1, "packed": 1, "disk": 1}
    assert same(cache.get("a"), VALUE)  # from the disk, where its file stays
    assert held(cache) == {"host": 1, "packed": 1, "disk": 2}
    assert cache.get("a", tiers=["host"]) is not None
    statistics = cache.stats()
    assert statistics["disk"].hits == 1
    assert statistics["host"].promotions == 1
    assert within_budgets(cache)


def test_a_hit_moves_among_the_tiers_that_were_looked_at() -> None:
    cache = cache_of("host", "packed")
    cache.put("a", VALUE, tier="packed")
    for _ in range(2):
        assert same(cache.get("a", tiers=("packed",)), VALUE)
    assert held(cache) == {"host": 0, "packed": 1}
    assert cache.get("a", tiers=("host",)) is None
    assert cache.get("a", tiers=()) is None
    assert same(cache.get("a", tiers=("packed", "host")), VALUE)
    assert held(cache) == {"host": 1, "packed": 0}


def test_a_look_up_that_is_kept_from_the_disk_does_not_write_there(
    clock: FakeClock, tmp_path: Path
) -> None:
    cache = cache_of(
        directory=tmp_path,
        tiers={
            "host": TierPolicy(room_for(1.5, VALUE), 10),
            "packed": TierPolicy(room_for(1.5, VALUE), 100),
            "disk": TierPolicy(LARGE, 1000),
        },
        clock=clock,
    )
    cache.put("small", VALUE[:5])
    cache.put("large", VALUE)
    assert cache.put("small", VALUE[:5], tier="packed") == "packed"
    assert cache.put("other", VALUE[:250], tier="packed") == "packed"
    clock.advance(200)  # all have outlived their tiers
    for key in ("small", "large", "other"):
        assert cache.get(key, tiers=("host", "packed")) is not None
    assert held(cache)["disk"] == 0
    cache.put("next", 1)
    assert within_budgets(cache)


def test_what_is_too_large_for_a_tier_goes_to_the_next(tmp_path: Path) -> None:
    cache = cache_of(
        "disk",
        directory=tmp_path,
        tiers={"host": TierPolicy(1000), "packed": TierPolicy(2000)},
    )
    assert cache.put("a", VALUE) == "disk"
    for _ in range(2):
        assert same(cache.get("a"), VALUE)
    assert held(cache) == {"host": 0, "packed": 0, "disk": 1}
    assert cache.stats()["host"].refused == 1
    assert cache.stats()["packed"].refused == 1


def test_what_is_too_large_for_all_is_not_stored(tmp_path: Path) -> None:
    tiers = dict.fromkeys(("host", "packed", "disk"), TierPolicy(3000))
    cache = cache_of(directory=tmp_path, tiers=tiers)
    cache.put("a", "old")
    assert cache.put("a", VALUE) is None
    assert cache.get("a") is None
    assert cache.stats().dropped == 1
    assert cache.stats().entries == 0


def test_what_fits_exactly_is_held() -> None:
    room = room_for(1, VALUE)
    assert cache_of(tiers={"host": TierPolicy(room)}).put("k", VALUE) == "host"
    assert cache_of(tiers={"host": TierPolicy(room - 1)}).put("k", VALUE) is None


def test_the_description_of_a_key_counts(tmp_path: Path) -> None:
    cache = cache_of(directory=tmp_path, tiers={"host": TierPolicy(room_for(1, VALUE))})
    assert cache.put("k" * 2000, VALUE) is None


def test_a_larger_value_in_place_of_a_smaller_one_makes_room() -> None:
    cache = cache_of(tiers={"host": TierPolicy(room_for(2, VALUE))})
    cache.put("a", VALUE[:10])
    cache.put("b", VALUE)
    cache.put("a", VALUE)
    assert held(cache) == {"host": 2}
    cache.put("a", np.concatenate([VALUE, VALUE]))
    assert held(cache) == {"host": 1}
    assert within_budgets(cache)


@pytest.mark.parametrize("names", [(), ("host",), ("packed",), ("disk",)])
def test_any_tier_alone_will_do(names: tuple[str, ...], tmp_path: Path) -> None:
    cache = cache_of(*names, directory=tmp_path)
    assert cache.put("a", VALUE) == (names[0] if names else None)
    found = cache.get("a")
    assert same(found, VALUE) if names else found is None
    cache.flush()
    cache.sweep()
    cache.shrink(1.0)
    cache.clear()
    assert cache.stats().entries == 0
    assert str(cache.stats())


# Time


LADDER = {
    "host": TierPolicy(LARGE, 10),
    "packed": TierPolicy(LARGE, 100),
    "disk": TierPolicy(LARGE, 1000),
}


def test_what_outlives_a_tier_goes_down(clock: FakeClock, tmp_path: Path) -> None:
    cache = cache_of(tiers=LADDER, directory=tmp_path, clock=clock)
    cache.put("a", VALUE)
    assert cache.next_deadline() == clock.now + 10
    clock.advance(9.9)
    assert cache.sweep() == 0
    clock.advance(0.1)
    assert cache.sweep() == 1
    assert held(cache) == {"host": 0, "packed": 1, "disk": 0}
    assert cache.next_deadline() == clock.now + 100
    clock.advance(100)
    assert cache.sweep() == 1
    assert held(cache) == {"host": 0, "packed": 0, "disk": 1}
    clock.advance(1000 - 110 - 0.1)
    assert same(cache.get("a", tiers=["disk"]), VALUE)
    clock.advance(0.1)
    assert cache.sweep() == 1
    assert held(cache) == {"host": 0, "packed": 0, "disk": 0}
    assert cache.next_deadline() is None
    expired = [tier.expirations for tier in cache.stats().tiers]
    assert expired == [1, 1, 1]


def test_a_look_up_finds_it_where_a_sweep_would_have_put_it(
    clock: FakeClock, tmp_path: Path
) -> None:
    cache = cache_of(tiers=LADDER, directory=tmp_path, clock=clock)
    cache.put("a", VALUE)
    clock.advance(10)
    assert same(cache.get("a"), VALUE)
    statistics = cache.stats()
    assert (statistics["host"].misses, statistics["packed"].hits) == (1, 1)
    assert statistics["host"].expirations == 1
    assert statistics["host"].promotions == 1
    assert held(cache) == {"host": 1, "packed": 0, "disk": 0}


def test_use_keeps_an_entry_up_but_does_not_prolong_its_life(
    clock: FakeClock, tmp_path: Path
) -> None:
    cache = cache_of(tiers=LADDER, directory=tmp_path, clock=clock)
    cache.put("a", VALUE)
    for _ in range(111):
        clock.advance(9)
        assert same(cache.get("a"), VALUE)
    assert cache.stats()["host"].hits == 111
    clock.advance(1)
    assert cache.get("a") is None
    assert held(cache) == {"host": 0, "packed": 0, "disk": 0}


def test_the_last_tiers_age_counts_where_there_is_no_other(clock: FakeClock) -> None:
    cache = cache_of(tiers={"host": TierPolicy(LARGE, 10)}, clock=clock)
    cache.put("a", VALUE)
    clock.advance(9)
    assert same(cache.get("a"), VALUE)
    clock.advance(1)
    assert cache.get("a") is None
    assert held(cache) == {"host": 0}


def test_an_upper_tier_without_limit_still_ends_by_age(
    clock: FakeClock, tmp_path: Path
) -> None:
    tiers = {"host": TierPolicy(LARGE), "disk": TierPolicy(LARGE, 50)}
    cache = cache_of(tiers=tiers, directory=tmp_path, clock=clock)
    cache.put("a", VALUE)
    cache.put("b", VALUE)
    clock.advance(50)
    assert cache.get("a") is None
    assert cache.sweep() == 1
    assert held(cache) == {"host": 0, "disk": 0}


def test_putting_moves_a_few_that_are_overdue(clock: FakeClock) -> None:
    cache = cache_of(tiers={"host": TierPolicy(LARGE, 10)}, clock=clock)
    for key in range(100):
        cache.put(f"old {key}", VALUE)
    clock.advance(10)
    for key in range(50):
        cache.put(f"new {key}", VALUE)
    assert held(cache) == {"host": 50}


def test_a_clock_that_goes_back_resurrects_nothing_in_memory(clock: FakeClock) -> None:
    cache = cache_of(tiers={"host": TierPolicy(LARGE, 10)}, clock=clock)
    cache.put("a", VALUE)
    clock.advance(10)
    clock.date -= 1e6
    assert cache.get("a") is None


# Everything else


def test_put_replaces_in_all_tiers(tmp_path: Path) -> None:
    cache = cache_of("host", "packed", "disk", directory=tmp_path)
    for tier in ("disk", "packed", "host", "packed", "disk"):
        cache.put("a", VALUE)
        cache.flush()
        cache.put("a", tier, tier=tier)
        assert cache.get("a") == tier
        assert sum(held(cache).values()) == (2 if tier == "disk" else 1)


def test_delete_and_clear(tmp_path: Path) -> None:
    cache = cache_of("host", "packed", "disk", directory=tmp_path)
    for tier in ("host", "packed", "disk"):
        cache.put(tier, VALUE, tier=tier)
        cache.put(f"{tier} too", VALUE, tier=tier)
    cache.flush()
    for tier in ("host", "packed", "disk"):
        assert cache.delete(tier)
        assert not cache.delete(tier)
        assert cache.get(tier) is None
    cache.clear()
    assert cache.stats().entries == 0
    assert cache.get("host too") is None
    assert all(tier.nbytes == 0 for tier in cache.stats().tiers)


def test_digests_tell_what_is_there(tmp_path: Path) -> None:
    cache = cache_of("host", "packed", "disk", directory=tmp_path)
    digests = {name: CacheKey.of(name).digest for name in ("host", "packed", "disk")}
    for name in digests:
        cache.put(name, VALUE, tier=name)
    cache.flush()
    assert cache.digests() == set(digests.values())
    assert cache.digests(["host", "packed"]) == {digests["host"], digests["packed"]}
    assert cache.stats().hits == cache.stats().misses == 0


def test_a_crafted_collision_is_a_miss(tmp_path: Path) -> None:
    key = CacheKey.of("mine")
    crafted = CacheKey(key.digest, b"another")
    for tier in ("host", "packed", "disk"):
        cache = cache_of("host", "packed", "disk", directory=tmp_path)
        cache.put(key, VALUE, tier=tier)
        assert cache.get(crafted) is None
        assert same(cache.get(key), VALUE)
        cache.put(crafted, "other")
        assert cache.get(key) is None
        assert cache.get(crafted) == "other"


def test_shrinking_takes_what_is_used_least_first(tmp_path: Path) -> None:
    cache = cache_of("host", "packed", "disk", directory=tmp_path)
    for key in "abcd":
        cache.put(key, VALUE, tier="packed" if key in "ab" else "host")
    whole = cache.stats()["host"].nbytes + cache.stats()["packed"].nbytes
    assert cache.shrink(0) == 0
    assert cache.shrink(1) >= 1
    assert held(cache) == {"host": 2, "packed": 1, "disk": 1}
    assert same(cache.get("a", tiers=["disk"]), VALUE)
    assert cache.shrink(0.5) >= 0.5 * (whole - 5000)
    assert held(cache) == {"host": 1, "packed": 0, "disk": 3}
    assert cache.shrink("1 MiB") > 0
    assert held(cache) == {"host": 0, "packed": 0, "disk": 4}
    assert cache.shrink(1.0) == 0
    for key in "abcd":
        assert same(cache.get(key), VALUE)


def test_shrinking_without_a_disk_drops() -> None:
    cache = cache_of("host", "packed")
    cache.put("a", VALUE)
    assert cache.shrink(1.0) > VALUE.nbytes
    assert cache.stats().entries == 0


@pytest.mark.parametrize("amount", [-1, 1.5, float("nan"), "much", -0.5])
def test_shrinking_by_nonsense_is_refused(amount: Any) -> None:
    with pytest.raises(ValueError, match="amount must be"):
        cache_of("host").shrink(amount)


@pytest.mark.parametrize("amount", [None, True, [1]])
def test_shrinking_by_other_types_is_refused(amount: Any) -> None:
    with pytest.raises(TypeError, match="amount must be"):
        cache_of("host").shrink(amount)


def test_a_closed_cache_is_empty_and_stays_so(tmp_path: Path) -> None:
    cache = cache_of("host", "disk", directory=tmp_path)
    with cache:
        cache.put("a", VALUE)
    assert cache.put("b", VALUE) is None
    assert cache.put("a", "another") is None
    assert cache.get("a") is None
    assert cache.stats()["host"].entries == 0
    cache.close()
    assert same(cache_of("disk", directory=tmp_path).get("a"), VALUE)


def test_what_only_memory_can_hold_is_dropped_at_its_end(tmp_path: Path) -> None:
    cache = cache_of("host", "packed", "disk", directory=tmp_path)
    cache.put("a", Opaque(1))
    cache.shrink(1.0)
    assert cache.get("a") is None
    assert cache.stats()["disk"].refused == 1


def test_counts_add_up(tmp_path: Path) -> None:
    cache = cache_of("host", "packed", "disk", directory=tmp_path)
    for place, tier in enumerate(("host", "packed", "disk")):
        cache.put(str(place), VALUE, tier=tier)
    for place in range(5):
        cache.get(str(place))
    statistics = cache.stats()
    assert [(tier.hits, tier.misses) for tier in statistics.tiers] == [
        (1, 4),
        (1, 3),
        (1, 2),
    ]
    assert (statistics.hits, statistics.misses) == (3, 2)
    assert statistics.hit_rate == 0.6
    assert statistics["packed"].hit_rate == 0.25
    assert statistics["host"].promotions == 2
    assert statistics.entries == 4
    assert statistics.to_dict()["tiers"][0]["name"] == "host"
    with pytest.raises(KeyError):
        statistics["tape"]
    assert cache_of("host").stats().hit_rate is None


def test_the_configuration_sets_the_defaults(tmp_path: Path) -> None:
    def limits(cache: TieredCache) -> dict[str, int]:
        return {tier.name: tier.budget for tier in cache.stats().tiers}

    assert limits(TieredCache()) == {"host": 10 * 2**20, "packed": 2**30}
    with dask.config.set(
        {
            "daskinfer.cache.directory": str(tmp_path),
            "daskinfer.cache.host.size": "5 MB",
            "daskinfer.cache.packed.size": 0,
        }
    ):
        assert limits(TieredCache()) == {"host": 5 * 10**6, "disk": 10 * 2**30}
    policies = {
        name: TierPolicy.configured(name) for name in ("device", "packed", "disk")
    }
    assert [(p.nbytes, p.ttl) for p in policies.values()] == [
        (2**20, 60.0),
        (2**30, 3600.0),
        (10 * 2**30, 86400.0),
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((-1,), ValueError),
        (("much",), ValueError),
        ((1.5,), TypeError),
        ((True,), TypeError),
        ((None,), TypeError),
        ((1, 0), ValueError),
        ((1, "soon"), ValueError),
        ((1, [1]), TypeError),
    ],
)
def test_a_policy_of_nonsense_is_refused(
    arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"nbytes|ttl"):
        TierPolicy(*arguments)


def test_unknown_tiers_are_refused() -> None:
    cache = cache_of("host")
    for call in (
        lambda: TieredCache(tiers={"tape": None}),
        lambda: cache.get("a", tiers=["tape"]),
        lambda: cache.put("a", 1, tier="tape"),
    ):
        with pytest.raises(ValueError, match="no tier 'tape'; there are device"):
            call()
    with pytest.raises(TypeError, match="must be a TierPolicy"):
        TieredCache(tiers={"host": "1 MiB"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="names of tiers"):
        cache.get("a", tiers="host")


def test_a_tier_that_is_not_there_means_the_next_one() -> None:
    cache = cache_of("packed")
    assert cache.put("a", 1, tier="device") == "packed"
    assert cache.put("a", 1, tier="disk") is None


@pytest.mark.parametrize("key", [1, None, ("a",), np.ones(2)])
def test_other_keys_are_refused(key: Any) -> None:
    cache = cache_of("host")
    for call in (cache.get, cache.delete, lambda key: cache.put(key, 1)):
        with pytest.raises(TypeError, match="cache key"):
            call(key)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ((b"short", b""), ValueError),
        ((b"x" * 65, b""), ValueError),
        (("x" * 32, b""), TypeError),
        ((b"x" * 32, "full"), TypeError),
    ],
)
def test_malformed_keys_are_refused(fields: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"digest|full"):
        CacheKey(*fields)


def test_keys_of_different_parts_differ() -> None:
    parts = [
        ("a",),
        (b"a",),
        ("a", ""),
        ("", "a"),
        ("a", "b"),
        ("ab",),
        (),
        ("\ud800",),
    ]
    assert len({CacheKey.of(*p).digest for p in parts}) == len(parts)
