"""A clock that tests set, values of every kind, and equality to the bit."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from daskinfer.cache import Clock, TieredCache, TierPolicy
from daskinfer.cache.build import FOLDER
from daskinfer.cache.contents import nbytes
from daskinfer.cache.tiers import ENTRY_BYTES

#: Bytes of a tier that everything here fits in.
LARGE = 1 << 26


class FakeClock(Clock):
    """Stands still until it is told otherwise."""

    def __init__(self, wall: float = 1.7e9) -> None:
        self.now = 1000.0
        self.date = wall
        super().__init__(lambda: self.now, lambda: self.date)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.date += seconds


def cache_of(*names: str, directory: Path | None = None, **options: Any) -> TieredCache:
    """A cache with these tiers only, all of them large."""
    policies = {name: TierPolicy(LARGE) for name in names}
    for name, policy in options.pop("tiers", {}).items():
        policies[name] = policy
    every = dict.fromkeys(("device", "host", "packed", "disk")) | policies
    return TieredCache(directory, tiers=every, **options)


def room_for(count: float, value: Any, key: str = "k") -> int:
    """Bytes of a tier of live objects that holds so many of a value."""
    return int(count * (nbytes(value) + ENTRY_BYTES + 9 + len(key)))


def files_in(directory: Path) -> list[Path]:
    return sorted((directory / FOLDER).iterdir())


class Point(NamedTuple):
    x: Any
    y: Any


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output:
    logits: Any
    hidden: Any = None

    def __eq__(self, other: object) -> bool:
        return same(self.__dict__, getattr(other, "__dict__", None))


class Opaque:
    """Of a class that only pickle can bring back."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Opaque and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in every bit, type, shape and container."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
            return False
        if a.layout is not torch.strided:
            return bool(torch.equal(a.to_dense(), b.to_dense()))
        return bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if a.dtype.hasobject:
            return all(map(same, a.ravel().tolist(), b.ravel().tolist()))
        if a.dtype.names:  # what lies between fields means nothing
            return all(same(a[name], b[name]) for name in a.dtype.names)
        return a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return same(np.asarray(a), np.asarray(b))
    if isinstance(a, dict):
        return all(map(same, a, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, float):
        return a.hex() == b.hex()
    return bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(flat.view(-1).view(torch.uint8).numpy()) if flat.numel() else b""


def float_dtypes() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


#: Data alone: found again from every tier, the disk too.
PLAIN: dict[str, Any] = {
    "float32": np.arange(6, dtype="f4").reshape(2, 3),
    "every byte": np.frombuffer(bytes(range(256)), "f4").copy(),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3), "i2"),
    "zero-dim": np.array(3.5),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(20)[::3],
    "negative strides": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "big-endian": np.arange(3, dtype=">f8"),
    "longdouble": np.arange(3, dtype="longdouble"),
    "complex": np.array([1 + 2j], "c8"),
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "durations": np.array([1, 2], "m8[25s]"),
    "text array": np.array(["a", "bcd", ""]),
    "empty text": np.array(["", ""]),
    "bytes array": np.array([b"a", b"bcd"]),
    "void": np.array([b"ab", b"cd"], "V2"),
    "records": np.array([(1, "x", 2)], [("a", "f4"), ("b", "U3"), ("c", ">i2")]),
    "nested records": np.zeros(
        2, [("a", "f4", (2, 3)), ("b", [("c", "i1"), ("d", "?")])]
    ),
    "padded records": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "titled records": np.zeros(2, [(("title", "a"), "i4")]),
    "numpy scalar": np.float32(0.1),
    "numpy bool": np.True_,
    "numpy date": np.datetime64("2020-01-01"),
    "large": np.arange(100_000, dtype="f4"),
    "tensor": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bool tensor": torch.tensor([True, False]),
    "empty tensor": torch.zeros(0, 3, dtype=torch.bfloat16),
    "zero-dim tensor": torch.tensor(2.5, dtype=torch.bfloat16),
    "strided tensor": torch.arange(20)[::3],
    "transposed tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    "conjugated tensor": torch.tensor([1 + 2j]).conj(),
    "gradient": torch.ones(2, requires_grad=True),
    "large tensor": torch.rand(300, 300),
    **{
        str(dtype): torch.rand(2, 3).to(dtype).view(torch.uint8).add(1).view(dtype)
        for dtype in float_dtypes()
    },
    "none": None,
    "true": True,
    "integers": [0, -1, 2**53, -(2**63), 10**5000],
    "floats": [0.1, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324],
    "complex numbers": [1 + 2j, complex("nan-0j")],
    "texts": ["", "text", "snow \N{SNOWMAN}", "\ud800", "a\0b", '"\\'],
    "bytes": [b"", b"\0\xff", bytes(10_000)],
    "containers": {"a": [(), [], {}], ("b", 1): {None: (1, [2.0])}, 3: "x", 2.5: b"y"},
    "order": {"z": 1, "a": 2},
    "ordered": OrderedDict(z=np.ones(2), a=1),
    "named tuple": Point(np.ones(2), Pair(torch.ones(2), "y")),
    "compressible": {"zeros": np.zeros(5000), "text": "again and " * 1000},
    "looks like markup": ["float", ["list", [1]], ["device", "x"]],
}

#: Only pickle brings these back: never in a file.
OTHER: dict[str, Any] = {
    "dataclass": Output(np.ones(3), [torch.ones(2)]),
    "opaque": {"x": Opaque([1, 2])},
    "object array": np.array([None, "x", [1]], dtype=object),
    "set": {1, 2},
    "bytearray": bytearray(b"abc"),
    "sparse": torch.eye(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "masked": np.ma.array([1, 2], mask=[True, False]),
    "memory map": np.arange(3).view(np.recarray),
    "range": range(5),
}
