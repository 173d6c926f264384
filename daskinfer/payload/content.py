"""What a request says, as a strong hash: equal only for equal requests."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from daskinfer.payload.tree import is_tensor
from daskinfer.transport.tensors import elements, is_plain

#: So many that nobody finds two requests of one hash.
CONTENT_BYTES = 64

#: NumPy's kinds of which the elements' bytes say everything.
_BYTES_SAY_ALL = frozenset("?bBiufcmMSU")


class NoContentError(TypeError):
    """A request has parts of which nobody can tell whether two are equal."""


def content_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Hash all of a request: names, kinds, dtypes, shapes and every element.

    Parameters
    ----------
    args, kwargs
        What the model is called with. Arrays, tensors on any device, numbers, texts,
        bytes and None, in dicts, lists, tuples, named tuples and plain dataclasses.

    Returns
    -------
    bytes
        :data:`CONTENT_BYTES` of BLAKE2b, the same in every process.

    Raises
    ------
    NoContentError
        If there is anything else in it, such as an object of a class that may hold
        what cannot be seen. The message names the class.

    Examples
    --------
    >>> x = np.zeros((2, 3), "f4")
    >>> content_of((x,), {}) == content_of((x.copy(),), {})
    True
    >>> others = [x.reshape(3, 2), x.view("i4"), x.tolist()]
    >>> any(content_of((x,), {}) == content_of((other,), {}) for other in others)
    False
    >>> content_of((object(),), {})
    Traceback (most recent call last):
        ...
    daskinfer.payload.content.NoContentError: builtins.object has no stable content
    """
    hasher = hashlib.blake2b(digest_size=CONTENT_BYTES)
    write = hasher.update
    try:
        _sequence(write, b"args", args)
        _mapping(write, b"kwargs", dict(sorted(kwargs.items())))
    except RecursionError:
        raise NoContentError("the request is nested too deeply") from None
    return hasher.digest()


_length = struct.Struct("<Q").pack

_Write = Callable[[Any], object]


def _visit(write: _Write, value: Any) -> None:
    cls = type(value)
    known = _KINDS.get(cls)
    if known is not None:
        known(write, value)
    elif isinstance(value, np.generic):
        _array(write, np.asarray(value), b"scalar")
    elif is_tensor(value):
        _tensor(write, value)
    elif issubclass(cls, tuple) and cls.__bases__ == (tuple,):
        if not hasattr(cls, "_fields") or getattr(value, "__dict__", None):
            raise _refusal(cls)
        _sequence(write, b"named" + _name(cls), value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _dataclass(write, value)
    else:
        raise _refusal(cls)


def _tag(write: _Write, kind: bytes, *lengths: int) -> None:
    """Begin a part so that no other sequence of parts has the same bytes."""
    write(b"".join([_length(length) for length in (len(kind), *lengths)]) + kind)


def _raw(write: _Write, kind: bytes, data: bytes) -> None:
    _tag(write, kind, len(data))
    write(data)


def _sequence(write: _Write, kind: bytes, values: Any) -> None:
    _tag(write, kind, len(values))
    for value in values:
        _visit(write, value)


def _mapping(write: _Write, kind: bytes, mapping: Any) -> None:
    _tag(write, kind, len(mapping))
    for key, value in mapping.items():
        _visit(write, key)
        _visit(write, value)


def _dataclass(write: _Write, value: Any) -> None:
    cls = type(value)
    names = {field.name for field in dataclasses.fields(cls)}
    # What else an instance may hold is in its base classes' hands, or in its own.
    plain = all(dataclasses.is_dataclass(base) for base in cls.__mro__[:-1])
    if not plain or set(getattr(value, "__dict__", ())) != names:
        raise _refusal(cls)
    fields = {name: vars(value)[name] for name in sorted(names)}
    _mapping(write, b"fields" + _name(cls), fields)


def _array(write: _Write, array: np.ndarray, kind: bytes = b"array") -> None:
    dtype = array.dtype
    if dtype.kind == "O":
        _tag(write, kind + b"objects", *array.shape)
        for element in array.ravel().tolist():
            _visit(write, element)
        return
    if dtype.kind not in _BYTES_SAY_ALL or not dtype.itemsize or dtype.metadata:
        raise NoContentError(f"an array of dtype {dtype} has no stable content")
    _tag(write, kind + dtype.str.encode(), array.ndim, *array.shape)
    write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _tensor(write: _Write, tensor: Any) -> None:
    kind = b"tensor" + (b"" if tensor.device.type == "cpu" else b" on a device")
    if tensor.device.type not in ("cpu", "meta"):
        tensor = tensor.cpu()
    if not is_plain(tensor):
        raise _refusal(type(tensor))
    array, dtype, requires_grad = elements(tensor)
    kind += (dtype or "").encode() + (b" grad" if requires_grad else b"")
    _array(write, array, kind)


#: By class: how a value of just this class is written.
_KINDS: dict[type, Callable[[_Write, Any], None]] = {
    np.ndarray: _array,
    np.memmap: _array,
    type(None): lambda write, value: _tag(write, b"None"),
    bool: lambda write, value: _tag(write, b"True" if value else b"False"),
    int: lambda write, value: _raw(write, b"int", hex(value).encode()),
    float: lambda write, value: _raw(write, b"float", struct.pack("<d", value)),
    complex: lambda write, value: _raw(
        write, b"complex", struct.pack("<dd", value.real, value.imag)
    ),
    str: lambda write, value: _raw(
        write, b"str", value.encode("utf-8", "surrogatepass")
    ),
    bytes: lambda write, value: _raw(write, b"bytes", value),
    bytearray: lambda write, value: _raw(write, b"bytearray", bytes(value)),
    list: lambda write, value: _sequence(write, b"list", value),
    tuple: lambda write, value: _sequence(write, b"tuple", value),
    dict: lambda write, value: _mapping(write, b"dict", value),
    OrderedDict: lambda write, value: _mapping(write, b"odict", value),
}


def _name(cls: type) -> bytes:
    return f"{cls.__module__}.{cls.__qualname__}".encode()


def _refusal(cls: type) -> NoContentError:
    return NoContentError(f"{cls.__module__}.{cls.__qualname__} has no stable content")
