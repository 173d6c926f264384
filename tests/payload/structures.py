"""Containers for the payload tests, and what it means that two payloads are equal."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Boxes:
    corners: Any
    scores: Any


@dataclass(frozen=True)
class Frozen:
    value: Any
    scale: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.value is None:
            raise ValueError("a value is needed")


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


@dataclass
class ModelOutput(OrderedDict):
    """Both a mapping and a dataclass, kept in step, as model libraries have it."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is not None:
                super().__setitem__(entry.name, getattr(self, entry.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, entry.name) for entry in fields(self))


def assert_same(got: Any, wanted: Any, path: str = "it") -> None:
    """Assert same values, containers, dtypes and shapes."""
    assert type(got) is type(wanted), path
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype, path
        assert got.shape == wanted.shape, path
        same = (got == wanted) | ((got != got) & (wanted != wanted))
        assert bool(same.all()), path
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype, path
        assert got.shape == wanted.shape, path
        np.testing.assert_array_equal(got, wanted)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), path
        for key in wanted:
            assert_same(got[key], wanted[key], f"{path}[{key!r}]")
    elif is_dataclass(wanted):
        for entry in fields(wanted):
            assert_same(
                getattr(got, entry.name),
                getattr(wanted, entry.name),
                f"{path}.{entry.name}",
            )
    elif isinstance(wanted, (tuple, list)):
        assert len(got) == len(wanted), path
        for i, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    else:
        assert got == wanted, path
