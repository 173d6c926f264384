"""What is put comes back, equal to the bit, from every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load as load_safetensors

from daskinfer.cache import structure, tiered
from daskinfer.cache.contents import isolate, nbytes
from daskinfer.cache.packing import pack, unpack
from tests.cache.helpers import OTHER, PLAIN, Opaque, cache_of, same

TIERS = ["host", "packed", "disk"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_comes_back_from_every_tier(
    name: str, tier: str, tmp_path: Path
) -> None:
    cache = cache_of(*TIERS, directory=tmp_path)
    assert cache.put(name, PLAIN[name], tier=tier) == tier
    assert same(cache.get(name, default="missing", tiers=[tier]), PLAIN[name])
    assert cache.stats()[tier].hits == 1
    # And once more, from where the hit has brought it.
    for _ in range(2):
        assert same(cache.get(name, default="missing"), PLAIN[name])


@pytest.mark.parametrize("tier", TIERS[:2])
@pytest.mark.parametrize("name", OTHER)
def test_other_objects_come_back_from_memory(name: str, tier: str) -> None:
    cache = cache_of("host", "packed")
    assert cache.put(name, OTHER[name], tier=tier) == tier
    for _ in range(2):
        assert same(cache.get(name, default="missing"), OTHER[name])


@pytest.mark.parametrize("name", OTHER)
def test_other_objects_are_never_in_a_file(name: str, tmp_path: Path) -> None:
    cache = cache_of(*TIERS, directory=tmp_path)
    assert cache.put(name, OTHER[name], tier="disk") is None
    assert cache.get(name, default="missing") == "missing"
    assert cache.stats()["disk"].refused == 1
    assert cache.stats().dropped == 1
    cache.put(name, OTHER[name])
    cache.close()
    assert cache.stats()["disk"].entries == 0


@pytest.mark.parametrize("name", PLAIN)
def test_a_later_process_reads_the_same(name: str, tmp_path: Path) -> None:
    with cache_of(*TIERS, directory=tmp_path) as cache:
        cache.put(name, PLAIN[name])
    again = cache_of(*TIERS, directory=tmp_path)
    assert same(again.get(name, default="missing"), PLAIN[name])


def test_what_comes_back_can_be_written_to_and_is_the_callers(tmp_path: Path) -> None:
    for tier in TIERS:
        cache = cache_of(*TIERS, directory=tmp_path)
        given_value = {"x": np.zeros(3), "y": [torch.zeros(3)]}
        cache.put("key", given_value, tier=tier)
        given_value["x"][:] = 7
        given_value["y"].append("more")
        for _ in range(3):
            found = cache.get("key")
            assert same(found, {"x": np.zeros(3), "y": [torch.zeros(3)]})
            found["x"][:] = 8
            found["y"][0][:] = 8
            found["y"].clear()


def test_without_copies_the_object_itself_comes_back() -> None:
    cache = cache_of("host", copy=False)
    value = [np.zeros(3)]
    cache.put("key", value)
    assert cache.get("key") is value


def test_none_is_a_value() -> None:
    cache = cache_of("host")
    cache.put("key", None)
    assert cache.get("key", default="missing") is None
    assert cache.get("other", default="missing") == "missing"


def test_values_whose_code_raises_are_not_stored(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            raise OSError("not this one")

        def __sizeof__(self) -> int:
            raise OSError("nor its size")

    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for value in (Hostile(), {"x": [Hostile()]}, endless, deep):
        cache = cache_of(*TIERS, directory=tmp_path)
        cache.put("key", "old")
        assert cache.put("key", value) in (None, "host")
        assert cache.put("key", value, tier="packed") is None
        assert cache.get("key", default="missing") == "missing"
    while isinstance(deep, list):
        deep = deep[0]  # or freeing it would be as deep


def test_a_value_that_cannot_be_restored_is_a_miss_and_removed() -> None:
    cache = cache_of("packed")
    cache.put("key", Unreadable())
    assert cache.get("key", default="missing") == "missing"
    assert cache.stats()["packed"].entries == 0
    assert cache.stats()["packed"].misses == 1


class Unreadable:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise RuntimeError("not here")


def test_tensors_on_a_device_that_the_cache_does_not_know_are_not_stored() -> None:
    cache = cache_of("host", "packed")
    assert cache.put("key", {"x": torch.ones(2, device="meta")}) is None
    assert cache.stats().dropped == 1


def test_a_file_is_a_safetensors_file_in_an_envelope() -> None:
    blob = structure.encode({"x": np.arange(4, dtype="u1"), "y": [torch.ones(2)]})
    found = load_safetensors(blob)
    assert found["0"].tolist() == [0, 1, 2, 3]
    assert found["1"].tobytes() == np.ones(2, "f4").tobytes()


def test_a_named_tuple_whose_class_is_not_there_is_refused() -> None:
    blob = structure.encode(PLAIN["named tuple"])
    with pytest.raises(LookupError, match=r"Poimt is no named tuple"):
        structure.decode(blob.replace(b"Point", b"Poimt"))
    # No class but a named tuple's is made from a name, and nothing is imported.
    with pytest.raises(LookupError):
        structure.decode(blob.replace(b"Point", b"Pairs"))


def test_no_file_makes_an_array_of_pointers() -> None:
    blob = structure.encode(np.zeros(2))
    with pytest.raises(ValueError, match="not plain data"):
        structure.decode(blob.replace(b"<f8", b"|O8"))


@pytest.mark.parametrize("value", [np.str_("a\0"), np.bytes_(b"a\0"), np.str_("")])
def test_numpys_own_texts_keep_their_zeros(value: Any) -> None:
    cache = cache_of("packed")
    cache.put("key", [value])
    (found,) = cache.get("key", default=[None])
    assert type(found) is type(value)
    assert found == value


def test_what_is_larger_than_every_tier_is_not_even_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[Any] = []
    monkeypatch.setattr(tiered, "isolate", copied.append)
    cache = cache_of("host", "packed")
    huge = np.broadcast_to(np.zeros(1), (1 << 50,))
    assert cache.put("key", {"x": huge}) is None
    assert cache.stats().dropped == 1
    assert copied == []


def test_pickle_is_for_what_has_no_structure_only() -> None:
    assert pack({"x": np.ones(3), "t": torch.ones(2)}).plain
    assert not pack({"x": Opaque(1)}).plain


def test_only_what_compresses_is_compressed() -> None:
    noise = np.random.default_rng(0).random(10_000, dtype="f4")
    assert not pack(noise).raw
    assert pack(np.zeros(10_000)).raw
    assert len(pack(np.zeros(10_000)).data) < 1_000
    assert not pack(np.zeros(2)).raw


@pytest.mark.parametrize(
    ("value", "least"),
    [
        (np.zeros(1000), 8000),
        ({"a": [np.zeros(1000), (np.zeros(1000),)]}, 16_000),
        (torch.zeros(1000, dtype=torch.bfloat16), 2000),
        ("x" * 5000, 5000),
        (b"x" * 5000, 5000),
        ({f"{i:04}" * 100: None for i in range(100)}, 40_000),
        (np.array(["x" * 5000, "y" * 5000], dtype=object), 10_000),
        ({"a": Opaque(None), "b": {1, 2, 3}}, 200),
        ([Opaque(Opaque(np.zeros(1000)))], 8000),
        (torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU()), 40_400),
    ],
)
def test_sizes_are_real(value: Any, least: int) -> None:
    assert least <= nbytes(value) <= 1.5 * least + 2000


def test_an_object_that_refers_to_itself_has_a_size() -> None:
    value = Opaque([np.zeros(1000)])
    value.value.append(value)
    assert 8000 <= nbytes(value) < 10_000


@pytest.mark.parametrize("name", PLAIN | OTHER)
def test_copies_are_the_same(name: str) -> None:
    value = (PLAIN | OTHER)[name]
    assert same(isolate(value), value)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | hnp.arrays(
        hnp.scalar_dtypes()
        | hnp.array_dtypes(allow_subarrays=True)
        | hnp.nested_dtypes(max_leaves=4),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
    ).filter(lambda array: not array.dtype.hasobject)
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys | st.tuples(keys, keys), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_any_plain_value_is_packed_and_unpacked(value: Any) -> None:
    assert same(unpack(pack(value)), value)
    assert nbytes(value) > 0
    assert same(isolate(value), value)
