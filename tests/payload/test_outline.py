"""What inputs look like, told to a reader."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.payload import outline

Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    text: str
    image: Any


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((), {}, ""),
        ((None,), {}, "None"),
        (("a secret",), {}, "str"),
        ((np.ones((1, 8), "float32"),), {}, "ndarray float32 (1, 8)"),
        (
            (torch.ones(2, 3, dtype=torch.bfloat16), "text"),
            {"mask": torch.ones(2, dtype=torch.bool)},
            "Tensor bfloat16 (2, 3), str, mask=Tensor bool (2,)",
        ),
        ((["one", "two"],), {"top_k": 5}, "[str, str], top_k=5"),
        ((Pair(1, (2.5,)),), {}, "Pair(1, (2.5,))"),
        (
            (Record("text", np.zeros((2, 2))),),
            {},
            "Record(text: str, image: ndarray float64 (2, 2))",
        ),
        (({"a": OrderedDict(b=True)},), {}, "{a: OrderedDict(b: True)}"),
        ((np.ma.masked_array([1.0]),), {}, "MaskedArray float64 (1,)"),
        ((10**5000, object()), {}, "int, object"),
        (([[[[1]]]],), {}, "[[[list of 1]]]"),
        ((list(range(9)),), {}, "[0, 1, 2, 3, 4, 5, 6, 7, ... 9 in all]"),
    ],
)
def test_outline(args: tuple[Any, ...], kwargs: dict[str, Any], told: str) -> None:
    assert outline(args, kwargs) == told


def test_a_long_one_is_cut() -> None:
    told = outline(tuple(np.broadcast_to(1.0, (1000, 1000)) for _ in range(12)), {})
    assert len(told) == 120
    assert told.startswith("ndarray float64 (1000, 1000), ") and told.endswith(" ...")


def test_what_holds_itself_ends() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert outline((endless,), {}) == "[[[list of 1]]]"
