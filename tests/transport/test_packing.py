"""pack and unpack: many results at once, each independent of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.transport import pack, unpack
from tests.payload.structures import assert_same
from tests.transport.samples import ARRAYS, exotic_tensors


def travel(values: list[Any]) -> list[Any]:
    header, frames = pack(values)
    return unpack(header, [bytes(frame) for frame in frames])


KINDS = [
    lambda i: np.full((1, 10), i, "float32"),
    lambda i: np.full((2, 5), i, "float32"),
    lambda i: np.full((1, 10), i, ">f4"),
    lambda i: np.array(i),
    lambda i: np.zeros((0, i % 3)),
    lambda i: np.array([f"text {i}"]),
    lambda i: np.full(2, i, "M8[ns]"),
    lambda i: np.full((2, 3), i).T,
    lambda i: torch.full((1, 10), i, dtype=torch.float32),
    lambda i: torch.full((1, 10), i % 7).bfloat16(),
    lambda i: torch.full((1, 10), i % 7).half(),
    lambda i: torch.tensor(i % 2 == 0),
    lambda i: torch.full((1, 10), float(i), requires_grad=True),
    lambda i: {"label": i, "scores": np.full(3, i)},
    lambda i: f"text {i}",
    lambda i: None,
    lambda i: np.full(20_000, i),
    lambda i: np.array([None, i], dtype=object),
]


@settings(deadline=None, max_examples=100)
@given(kinds=st.lists(st.integers(0, len(KINDS) - 1), max_size=20))
def test_values_arrive_in_order_and_as_they_were(kinds: list[int]) -> None:
    values = [KINDS[kind](i) for i, kind in enumerate(kinds)]
    assert_same(travel(values), values)


def test_every_array_and_odd_tensor() -> None:
    values = [*ARRAYS.values(), exotic_tensors()["tagged"]]
    arrived = travel(values)
    assert_same(arrived, values)
    assert arrived[-1].label == "cat"


def test_equal_shapes_share_one_buffer() -> None:
    arrays = [np.full((1, 10), i) for i in range(100)]
    tensors = [torch.full((1, 10), i) for i in range(100)]
    _, frames = pack([*arrays, *tensors])
    assert len(frames) == 2


def test_unpacked_values_are_independent_and_writable() -> None:
    first, second = travel([np.zeros(3), np.zeros(3)])
    assert first.base is None
    first[:] = 1
    assert second.tolist() == [0, 0, 0]
    one, two = travel([torch.zeros(3), torch.zeros(3)])
    assert one.untyped_storage().nbytes() == one.nbytes
    one.fill_(1)
    assert two.tolist() == [0, 0, 0]


def test_nothing_packs_to_nothing() -> None:
    header, frames = pack([])
    assert frames == []
    assert unpack(header, frames) == []
