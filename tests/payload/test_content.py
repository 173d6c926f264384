"""What requests say."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.payload import NoContentError, content_of

Pair = namedtuple("Pair", "left right")


@dataclass
class Fields:
    x: Any
    n: int = 0


class Hidden(list[int]):
    """Holds more than its items."""


ZEROS = np.zeros((2, 3), "f4")

#: Requests of which no two say the same.
DIFFERENT: list[Any] = [
    ZEROS,
    ZEROS.reshape(3, 2),
    ZEROS.reshape(1, 2, 3),
    ZEROS.view("i4"),
    ZEROS.astype(">f4"),
    ZEROS.astype("f8"),
    -ZEROS,
    ZEROS.tolist(),
    ZEROS.tobytes(),
    torch.zeros(2, 3),
    torch.zeros(2, 3, dtype=torch.bfloat16),
    torch.zeros(2, 3, dtype=torch.float16),
    torch.zeros(2, 3, dtype=torch.int16),
    torch.zeros(2, 3, requires_grad=True),
    np.zeros((0, 3)),
    np.zeros((3, 0)),
    np.float32(0),
    np.array(0, "f4"),
    np.array(["a", "bc"], object),
    np.array(["ab", "c"], object),
    np.array(["a", "bc"]),
    np.array([0], "M8[s]"),
    np.array([0], "M8[ms]"),
    *(0, 0.0, -0.0, False, None, 0j, "0", b"0", bytearray(b"0"), 2**70, True, 1),
    *([], (), {}, OrderedDict(), [[]], ([],), [1, 2], (1, 2), Pair(1, 2), [[1], 2]),
    *(["ab", "c"], ["a", "bc"], ["abc"], "abc"),
    *({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 1}, {"a": {"b": 2}}),
    *(Fields(1), Fields(1, 1), Fields([1])),
]


def test_requests_that_differ_in_anything_have_different_hashes() -> None:
    requests = [((value,), {}) for value in DIFFERENT]
    requests += [((), {"x": value}) for value in DIFFERENT]
    requests += [((1,), {"k": 2}), ((1,), {"k": 3}), ((1,), {"l": 2}), ((1, 2), {})]
    hashes = [content_of(args, kwargs) for args, kwargs in requests]
    assert len(set(hashes)) == len(hashes)


def test_equal_requests_have_equal_hashes_however_they_lie_in_memory() -> None:
    wide = np.arange(24.0).reshape(4, 6)
    assert content_of((wide[:, ::2],), {}) == content_of((wide[:, ::2].copy(),), {})
    assert content_of((wide,), {}) == content_of((np.asfortranarray(wide),), {})
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    assert content_of((tensor.T,), {}) == content_of((tensor.T.contiguous(),), {})
    z = torch.ones(2, dtype=torch.complex64) * 1j
    assert content_of((z.conj(),), {}) == content_of((z.conj().resolve_conj(),), {})
    assert content_of((), {"a": 1, "b": 2}) == content_of((), {"b": 2, "a": 1})


def test_what_may_hold_more_than_can_be_seen_has_no_content() -> None:
    marked = Fields(1)
    marked.more = 2  # type: ignore[attr-defined]
    for value in (
        object(),
        {1, 2},
        len,
        Hidden([1]),
        marked,
        np.ma.masked_array([1, 2], [True, False]),
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        torch.zeros(2).to_sparse(),
        torch.empty(2, device="meta"),
        [[object()]],
    ):
        with pytest.raises(NoContentError):
            content_of((value,), {})
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(NoContentError):
        content_of((nested,), {})
