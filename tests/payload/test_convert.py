"""Arrays for a module, and its answer in arrays."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.payload import map_arrays, to_numpy, to_tensors
from tests.payload.structures import Pair, assert_same


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.arange(6)[::-1],
        np.arange(12).reshape(3, 4).T,
        np.arange(12)[::2],
        np.broadcast_to(np.arange(3), (2, 3)),
        np.zeros(0, "float16"),
        np.array(3, "uint32"),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.zeros(3, [("a", "u1"), ("b", "f4")])["b"],
    ],
    ids=lambda array: f"{array.dtype.str}{array.strides}",
)
def test_any_numeric_array_becomes_an_equal_tensor(array: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor, had_numpy = to_tensors(array)
    assert had_numpy
    native = array.astype(array.dtype.newbyteorder("="))
    assert_same(tensor.numpy(), native)


def test_a_plain_array_is_shared_and_a_read_only_one_copied() -> None:
    array = np.zeros(3)
    to_tensors(array)[0][0] = 1
    assert array[0] == 1
    array.flags.writeable = False
    to_tensors(array)[0][0] = 2
    assert array[0] == 1


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([b"a"]),
        np.array([None]),
        np.zeros(1, [("a", "f4")]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(1, np.longdouble),
    ],
    ids=lambda array: array.dtype.kind,
)
def test_arrays_without_a_tensor_are_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"has no tensor equivalent; .* callable"):
        to_tensors({"x": [array]})


def test_arrays_are_answered_in_arrays_and_tensors_in_tensors() -> None:
    assert to_tensors((torch.ones(1), {"k": "x"}))[1] is False
    assert to_tensors(("no arrays", 1))[1] is False
    assert to_tensors((np.ones(1), torch.ones(1)))[1] is False
    assert to_tensors(Pair(np.ones(1), np.ones(1)))[1] is True


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float32, "float32"),
        (torch.bool, "bool"),
        (torch.bfloat16, "float32"),
        (torch.float8_e5m2, "float32"),
        (torch.uint16, "uint16"),
        (torch.complex64, "complex64"),
    ],
)
def test_tensors_become_arrays(dtype: torch.dtype, wanted: str) -> None:
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    array = to_numpy({"y": tensor})["y"]
    assert_same(array, np.array([0, 1, 1], wanted))


def test_odd_tensors_become_arrays() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert to_numpy(weight * 2).tolist() == [2, 2]
    conj = torch.tensor([1 + 2j]).conj()
    assert to_numpy(conj).tolist() == [1 - 2j]
    assert to_numpy(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]


def test_map_arrays_leaves_the_rest() -> None:
    rest: list[Any] = ["text", 1, None, {1, 2}]
    mapped = map_arrays({"a": np.ones(1), "rest": rest}, lambda _: "array")
    assert mapped == {"a": "array", "rest": rest}
