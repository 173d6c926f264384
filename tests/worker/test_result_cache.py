"""The cache of one deployment on one worker."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer import CachePolicy, TierPolicy
from daskinfer.cache import CacheKey
from daskinfer.worker.caching import excess_bytes
from daskinfer.worker.result_cache import (
    ID_BYTES,
    MISSING,
    NotCacheable,
    ResultCache,
    copy_of,
)

Pair = namedtuple("Pair", "left right")


@dataclass
class Fields:
    x: Any


RESULTS: dict[str, Any] = {
    "array": np.arange(6, dtype="f4").reshape(2, 3),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3), "f8"),
    "zero-dimensional": np.array(3, "i2"),
    "not contiguous": np.arange(12.0).reshape(3, 4)[:, ::2],
    "scalar": np.float16(1.5),
    "tensor": torch.arange(6).reshape(2, 3),
    "bfloat16": torch.linspace(0, 1, 6, dtype=torch.bfloat16),
    "list": [np.ones(2), [1, None]],
    "tuple": (torch.ones(2), "text"),
    "named": Pair(np.ones(2), 2),
    "dict": {"a": np.ones(2), "b": {"c": torch.zeros(1)}},
    "odict": OrderedDict(a=np.ones(2)),
    "dataclass": Fields(np.ones(2)),
    "plain": ["text", b"bytes", 1, 1.5, True, None, 2j],
}


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal in every respect."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Fields):
        return same(a.x, b.x)
    return bool(a == b)


NO_HOST = CachePolicy(host=None)


@pytest.mark.parametrize("policy", [CachePolicy(), NO_HOST], ids=["host", "packed"])
@pytest.mark.parametrize("kind", RESULTS)
def test_a_hit_is_what_was_put(kind: str, policy: CachePolicy) -> None:
    cache = ResultCache("net", policy)
    key = cache.key("digest", b"content")
    assert cache.get(key) is MISSING
    cache.put(key, copy_of(RESULTS[kind]), cache.generation)
    assert same(cache.get(key), RESULTS[kind])
    assert same(cache.get(key), RESULTS[kind])


def test_nobody_can_change_what_others_get() -> None:
    cache = ResultCache("net", CachePolicy())
    key = cache.key("digest", b"content")
    result = {"x": np.zeros(3), "y": [torch.zeros(2)]}
    cache.put(key, copy_of(result), cache.generation)
    result["x"][:] = 1
    for _ in range(2):
        hit = cache.get(key)
        assert not hit["x"].any() and not hit["y"][0].any()
        hit["x"][:] = 2
        hit["y"][0][:] = 2
        hit["y"].append("more")


@pytest.mark.parametrize("value", [{1}, [object()], {"a": lambda: 0}])
def test_what_cannot_be_copied_for_sure_is_refused(value: Any) -> None:
    with pytest.raises(NotCacheable):
        copy_of(value)


def test_a_crafted_collision_is_a_miss() -> None:
    cache = ResultCache("net", CachePolicy())
    key = cache.key("digest", b"content")
    cache.put(key, "secret", cache.generation)
    assert cache.get(cache.key("other", b"content")) is MISSING
    for other in (cache.key("digest", b"another"), cache.key("other", b"content")):
        assert cache.get(CacheKey(key.digest, other.full)) is MISSING
    assert cache.get(key) == "secret"


def test_what_was_computed_before_it_was_cleared_stays_away() -> None:
    cache = ResultCache("net", CachePolicy())
    key, before = cache.key("digest", b"content"), cache.generation
    cache.put(key, 1, before)
    cache.clear()
    assert cache.get(key) is MISSING
    cache.put(key, 1, before)
    assert cache.get(key) is MISSING


def test_the_next_process_finds_what_is_on_disk(tmp_path: Path) -> None:
    cache = ResultCache("net", CachePolicy(), tmp_path)
    key = cache.key("digest", b"content")
    value = torch.ones(3, dtype=torch.bfloat16)
    cache.put(key, value, cache.generation)
    cache.close()
    again = ResultCache("net", CachePolicy(), tmp_path)
    again.sweep()
    assert again.changes() == (key.digest[:ID_BYTES], b"")
    assert same(again.get(key), value)
    other = ResultCache("another", CachePolicy(), tmp_path)
    assert other.get(other.key("digest", b"content")) is MISSING
    other.clear()
    assert same(again.get(key), value), "deployments share no files"


def test_no_file_is_written_where_the_policy_has_no_disk(tmp_path: Path) -> None:
    cache = ResultCache("net", CachePolicy(disk=None), tmp_path)
    cache.put(cache.key("digest", b"content"), 1, cache.generation)
    cache.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_it_tells_once_what_came_and_what_left() -> None:
    policy = CachePolicy(host=TierPolicy(8000), packed=None)
    cache = ResultCache("net", policy)
    keys = [cache.key("digest", hashlib.sha256(bytes([n])).digest()) for n in range(20)]
    told: set[bytes] = set()
    for key in keys:
        cache.put(key, np.zeros(10), cache.generation)
        told.add(cache.told([key]))
        cache.stored([key])
    assert told == {key.digest[:ID_BYTES] for key in keys}
    added, dropped = cache.changes()
    assert added == b""
    gone = {dropped[i : i + ID_BYTES] for i in range(0, len(dropped), ID_BYTES)}
    here = {key.digest[:ID_BYTES] for key in keys if cache.get(key) is not MISSING}
    assert 0 < len(here) < 20 and told - gone == here
    assert cache.changes() == (b"", b"")


def test_memory_goes_back_before_dask_acts() -> None:
    assert excess_bytes(10**9, None, 0.7, 0.8) == 0
    assert excess_bytes(10**9, 10**9, False, False) == 0
    for spill, pause, first in ((0.7, 0.8, 0.7), (False, 0.8, 0.8), (0.9, 0.5, 0.5)):
        at = int(first * 10**9)
        assert excess_bytes(at, 10**9, spill, pause) > 0
        assert excess_bytes(at - at // 10 - 1, 10**9, spill, pause) == 0
