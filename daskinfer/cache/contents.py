"""Values as a cache holds them: how large they are, and copies of their own."""

from __future__ import annotations

import copy
import sys
from logging import Logger
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from dask.sizeof import sizeof

from daskinfer.payload.tree import is_strided, is_tensor, map_arrays, open_node

#: What an array or a tensor takes besides its elements.
_ARRAY_BYTES = 112
_TENSOR_BYTES = 400
#: What is there in any case, and not a value's own.
_SHARED = (type, ModuleType, FunctionType, MethodType, Logger)
#: An object that refers to more than so many others is not counted to the end.
_MOST_OBJECTS = 10_000


def nbytes(value: Any) -> int:
    """Return the bytes of memory that a value takes.

    Parameters
    ----------
    value
        Anything. Containers are counted with all that is in them, other objects with
        their attributes, a network's weights for instance, unless
        :func:`dask.sizeof.sizeof` knows their class.

    Raises
    ------
    RecursionError
        It is nested too deeply, or holds itself.

    Examples
    --------
    >>> nbytes(np.zeros(1000)) // 1000
    8
    >>> nbytes({"a": [np.zeros(1000), np.zeros(1000)]}) // 1000
    16
    """
    return _size(value, set())


def _size(value: Any, seen: set[int]) -> int:
    if isinstance(value, np.ndarray):
        size = _ARRAY_BYTES + value.nbytes
        if value.dtype.hasobject:
            elements = value.astype(object).ravel().tolist()
            size += sum(_size(element, seen) for element in elements)
        return size
    if is_tensor(value):
        if value.is_cpu and not is_strided(value):
            return _TENSOR_BYTES + int(sizeof(value))
        return _TENSOR_BYTES + int(value.nbytes)
    if isinstance(value, OnDevice):
        return _size(value.tensor, seen)
    node = open_node(value)
    if node is None:
        return _object_size(value, seen)
    size = sys.getsizeof(value) + sum(_size(child, seen) for child in node.children)
    if not isinstance(value, (tuple, list)):
        size += sum(map(sys.getsizeof, node.keys))
    return size


def _object_size(value: Any, seen: set[int]) -> int:
    """Count an object with its attributes, each once: objects may refer to others."""
    size = max(int(sizeof(value)), sys.getsizeof(value))
    unknown = sizeof.dispatch(type(value)) is sizeof.dispatch(object)
    if not unknown or isinstance(value, _SHARED) or id(value) in seen:
        return size
    seen.add(id(value))
    attributes = getattr(value, "__dict__", None)
    if attributes and len(seen) < _MOST_OBJECTS:
        size += sum(_size(attribute, seen) for attribute in list(attributes.values()))
    return size


def isolate(value: Any) -> Any:
    """Return a value that shares no array, tensor or container with the given one.

    Objects of unknown classes are shared.

    Examples
    --------
    >>> given = [np.zeros(2)]
    >>> kept = isolate(given)
    >>> given[0][:] = 7
    >>> kept
    [array([0., 0.])]
    """
    return map_arrays(value, _own)


def _own(array: Any) -> Any:
    if not is_tensor(array):
        # Of objects, the array holds references only.
        return copy.deepcopy(array) if array.dtype.hasobject else array.copy()
    if type(array) is not sys.modules["torch"].Tensor or array.__dict__:
        return copy.deepcopy(array)
    fresh = array.detach().clone()
    return fresh.requires_grad_() if array.requires_grad else fresh


class OnDevice:
    """A tensor that is kept on the host and belongs on the device.

    It stands in for the tensor in tiers below the device's, so that what comes back
    lies where it lay when it was put.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"<OnDevice {tuple(self.tensor.shape)} {self.tensor.dtype}>"

    def __reduce__(self) -> Any:
        return OnDevice, (self.tensor,)
