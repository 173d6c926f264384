"""Chunks, and the digests that are made of their hashes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.artifact import chunks as module
from daskinfer.artifact.chunks import Chunks
from daskinfer.artifact.digests import content_digest, version_digest

WEIGHTS = memoryview(bytes(range(256)))


@given(data=st.binary(min_size=1, max_size=200), chunk_size=st.integers(1, 64))
def test_spans_cover_everything_once(data: bytes, chunk_size: int) -> None:
    chunks = Chunks.of(memoryview(data), chunk_size)
    parts = [data[slice(*chunks.span(i))] for i in range(len(chunks))]
    assert b"".join(parts) == data
    assert all(chunks.is_whole(i, part) for i, part in enumerate(parts))
    assert chunks.is_all_whole(memoryview(data))
    assert Chunks.from_message(chunks.to_message()) == chunks


@given(data=st.binary(min_size=1, max_size=200), place=st.integers(0, 199))
def test_any_flipped_bit_is_found(data: bytes, place: int) -> None:
    chunks = Chunks.of(memoryview(data), 16)
    other = bytearray(data)
    other[place % len(data)] ^= 0b100
    assert not chunks.is_all_whole(memoryview(other))
    assert not chunks.is_all_whole(memoryview(data + b"0"))
    assert not chunks.is_all_whole(memoryview(data[:-1]))
    assert Chunks.of(memoryview(other), 16).key != chunks.key


def test_large_weights_have_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4)
    monkeypatch.setattr(module, "MAX_CHUNKS", 8)
    sizes = {n: Chunks.of(WEIGHTS[:n]).chunk_size for n in (1, 32, 33, 64, 256)}
    assert sizes == {1: 4, 32: 4, 33: 8, 64: 8, 256: 32}


@pytest.mark.parametrize(
    "change",
    [
        {"size": 1000},
        {"chunk_size": 0},
        {"chunk_size": -64},
        {"hashes": b"too short"},
        {"hashes": b""},
        {"size": 0},
    ],
)
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    message = Chunks.of(WEIGHTS, 64).to_message()
    with pytest.raises(ValueError, match="do not describe"):
        Chunks.from_message({**message, **change})


def test_digests_cover_each_part() -> None:
    chunks = Chunks.of(WEIGHTS, 64)
    others = Chunks.of(WEIGHTS, 32)
    parts: list[tuple[str, bytes, Chunks | None]] = [
        ("module", b"builder", chunks),
        ("callable", b"builder", chunks),
        ("module", b"other", chunks),
        ("module", b"builder", None),
        ("module", b"builder", others),
        ("module", b"builder", Chunks.of(WEIGHTS[1:], 64)),
        ("moduleb", b"uilder", chunks),
    ]
    assert len({content_digest(*each) for each in parts}) == len(parts)


def test_a_versions_digest_covers_the_policy() -> None:
    policy = {"max_batch_size": 8, "max_wait": 0.1, "allowed_batch_sizes": (1, 8)}
    digest = version_digest("abc", policy)
    assert digest == version_digest("abc", {**policy, "allowed_batch_sizes": [1, 8]})
    assert digest != version_digest("abd", policy)
    assert all(
        version_digest("abc", {**policy, field: None}) != digest for field in policy
    )


def test_equal_bytes_have_equal_keys() -> None:
    chunks = Chunks.of(WEIGHTS, 64)
    assert Chunks.of(memoryview(bytearray(WEIGHTS)), 64) == chunks
    with pytest.raises(ValueError, match="do not describe"):
        replace(chunks, chunk_size=32)
