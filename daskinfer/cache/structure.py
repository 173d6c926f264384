"""Values as JSON and raw bytes, in the safetensors format, without pickle.

Only what can be built again from data alone is taken: arrays, tensors, NumPy's
scalars, Python's own simple types, and dicts, lists, tuples and named tuples of
these. Reading runs no code but this module's.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from daskinfer.cache.contents import OnDevice
from daskinfer.payload.tree import is_tensor
from daskinfer.transport.tensors import elements, from_elements, is_plain

Buffer = bytes | memoryview

_LENGTH_BYTES = 8
_ALIGNMENT = 8
#: Larger arrays are copied into the blob only; smaller ones are faster copied twice.
_UNCOPIED_BYTES = 64 * 1024
#: Beyond this JSON readers may take an integer for a float.
_EXACT = 2**53


class NoStructureError(TypeError):
    """A value has parts that data alone do not bring back."""


def encode(value: Any) -> bytes:
    """Write a value as a safetensors blob.

    Its metadata hold the structure as JSON, its entries the bytes of arrays.

    Raises
    ------
    NoStructureError
        The value holds an object of another class, or an array of objects. The
        message names its class.
    RecursionError
        It is nested too deeply.

    Examples
    --------
    >>> decode(encode({"x": (np.arange(2), None), 1: float("inf")}))
    {'x': (array([0, 1]), None), 1: inf}
    """
    buffers: list[Buffer] = []
    structure = _Encoder(buffers).encode(value)
    header: dict[str, Any] = {
        "__metadata__": {"structure": json.dumps(structure, separators=(",", ":"))}
    }
    end = 0
    for index, buffer in enumerate(buffers):
        start, end = end, end + len(buffer)
        header[str(index)] = {
            "dtype": "U8",
            "shape": [len(buffer)],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *buffers])


def decode(blob: Buffer) -> Any:
    """Read a value that :func:`encode` wrote.

    Returns
    -------
    Any
        The value. Its arrays own their memory and can be written to.

    Raises
    ------
    Exception
        The blob is not one of :func:`encode`, or holds a named tuple whose class is
        not there (LookupError).
    """
    view = memoryview(blob)
    base = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    header = json.loads(bytes(view[_LENGTH_BYTES:base]))
    structure = json.loads(header.pop("__metadata__")["structure"])
    buffers = []
    for index in range(len(header)):
        start, end = header[str(index)]["data_offsets"]
        buffers.append(view[base + start : base + end])
    return _Decoder(buffers).decode(structure)


class _Encoder:
    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers

    def encode(self, value: Any) -> Any:
        cls = type(value)
        if value is None or cls is bool or cls is str:
            return value
        if cls is int:
            return value if -_EXACT < value < _EXACT else ["int", hex(value)]
        write = _WRITERS.get(cls)
        if write is not None:
            return write(self, value)
        if issubclass(cls, np.generic):
            return ["scalar", self.array(np.asarray(value))]
        if is_tensor(value):
            return self.tensor(value)
        if issubclass(cls, tuple) and _find_class(*_name(cls)) is cls:
            return ["named", *_name(cls), list(value._fields), self.items(value)]
        raise NoStructureError(f"{cls.__module__}.{cls.__qualname__} is not plain data")

    def items(self, values: Any) -> list[Any]:
        return [self.encode(value) for value in values]

    def pairs(self, mapping: Any) -> list[Any]:
        return [[self.encode(key), self.encode(v)] for key, v in mapping.items()]

    def buffer(self, data: Buffer) -> int:
        self.buffers.append(data)
        return len(self.buffers) - 1

    def array(self, array: np.ndarray) -> list[Any]:
        dtype = array.dtype
        if dtype.hasobject:
            raise NoStructureError(f"an array of dtype {dtype} is not plain data")
        descr = np.lib.format.dtype_to_descr(dtype)
        if dtype.kind == "V":
            text = json.dumps(descr)
            if _dtype(json.loads(text)) != dtype:
                raise NoStructureError(f"dtype {dtype} is not plain data")
        return ["array", self.buffer(_elements(array)), descr, list(array.shape)]

    def tensor(self, tensor: Any) -> list[Any]:
        if not is_plain(tensor):
            raise NoStructureError(f"a {type(tensor).__name__} is not plain data")
        array, dtype, requires_grad = elements(tensor)
        return ["tensor", self.array(array), dtype, requires_grad]


_WRITERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    float: lambda e, v: ["float", struct.pack("<d", v).hex()],
    complex: lambda e, v: ["complex", struct.pack("<dd", v.real, v.imag).hex()],
    bytes: lambda e, v: ["bytes", e.buffer(v)],
    list: lambda e, v: ["list", e.items(v)],
    tuple: lambda e, v: ["tuple", e.items(v)],
    dict: lambda e, v: ["dict", e.pairs(v)],
    OrderedDict: lambda e, v: ["odict", e.pairs(v)],
    np.ndarray: _Encoder.array,
    # As arrays, and in NumPy's own pickles, these two lose zeros at their ends.
    np.str_: lambda e, v: ["str_", str.__str__(v)],
    np.bytes_: lambda e, v: ["bytes_", e.buffer(bytes(v))],
    OnDevice: lambda e, v: ["device", e.encode(v.tensor)],
}


class _Decoder:
    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers

    def decode(self, written: Any) -> Any:
        if type(written) is not list:
            return written
        kind, *parts = written
        return _READERS[kind](self, *parts)

    def items(self, values: list[Any]) -> list[Any]:
        return [self.decode(value) for value in values]

    def pairs(self, pairs: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in pairs]

    def array(self, index: int, descr: Any, shape: list[int]) -> np.ndarray:
        dtype = _dtype(descr)
        if dtype.hasobject:
            raise ValueError(f"an array of dtype {dtype} is not plain data")
        return np.ndarray(shape, dtype, bytearray(self.buffers[index]))

    def named(
        self, module: str, name: str, fields: list[str], values: list[Any]
    ) -> Any:
        cls = _find_class(module, name)
        if cls is None or list(cls._fields) != fields:
            raise LookupError(f"{module}.{name} is no named tuple of {fields} here")
        return tuple.__new__(cls, self.items(values))


_READERS: dict[str, Callable[..., Any]] = {
    "int": lambda d, digits: int(digits, 16),
    "float": lambda d, bits: struct.unpack("<d", bytes.fromhex(bits))[0],
    "complex": lambda d, bits: complex(*struct.unpack("<dd", bytes.fromhex(bits))),
    "bytes": lambda d, index: bytes(d.buffers[index]),
    "list": _Decoder.items,
    "tuple": lambda d, values: tuple(d.items(values)),
    "dict": lambda d, pairs: dict(d.pairs(pairs)),
    "odict": lambda d, pairs: OrderedDict(d.pairs(pairs)),
    "array": _Decoder.array,
    "str_": lambda d, text: np.str_(text),
    "bytes_": lambda d, index: np.bytes_(bytes(d.buffers[index])),
    "scalar": lambda d, written: d.decode(written)[()],
    "tensor": lambda d, written, *rest: from_elements(d.decode(written), *rest),
    "device": lambda d, written: OnDevice(d.decode(written)),
    "named": _Decoder.named,
}


def _elements(array: np.ndarray) -> Buffer:
    if array.nbytes < _UNCOPIED_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _name(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _find_class(module: str, name: str) -> Any:
    """Find a named tuple's class among what is imported; importing runs code."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr, which may run a module's own code.
        found = getattr(found, "__dict__", {}).get(part)
    ours = isinstance(found, type) and issubclass(found, tuple)
    # What its own constructor does, or what it keeps besides its items, is not here.
    plain = ours and found.__bases__ == (tuple,) and hasattr(found, "_fields")
    return found if plain else None


def _dtype(descr: Any) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(_tuples(descr))


def _tuples(descr: Any) -> Any:
    """Make a structured dtype's description of JSON what NumPy wants: tuples."""
    if isinstance(descr, str):
        return descr
    return [
        tuple(tuple(part) if i == 2 else _field(part) for i, part in enumerate(entry))
        for entry in descr
    ]


def _field(part: Any) -> Any:
    if isinstance(part, str):
        return part
    if len(part) == 2 and all(isinstance(p, str) for p in part):
        return tuple(part)
    return _tuples(part)
