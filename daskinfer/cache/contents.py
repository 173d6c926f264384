"""Values as a cache holds them: how large they are, and copies of their own."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
from dask.sizeof import sizeof

from daskinfer.payload.tree import is_strided, is_tensor, map_arrays, open_node

#: What an array or a tensor takes besides its elements.
_ARRAY_BYTES = 112
_TENSOR_BYTES = 400


def nbytes(value: Any) -> int:
    """Return the bytes of memory that a value takes.

    Parameters
    ----------
    value
        Anything. Containers are counted with all that is in them, objects of unknown
        classes by :func:`dask.sizeof.sizeof`.

    Examples
    --------
    >>> nbytes(np.zeros(1000)) // 1000
    8
    >>> nbytes({"a": [np.zeros(1000), np.zeros(1000)]}) // 1000
    16
    """
    if isinstance(value, np.ndarray):
        size = _ARRAY_BYTES + value.nbytes
        if value.dtype.hasobject:
            size += sum(map(nbytes, value.astype(object).ravel().tolist()))
        return size
    if is_tensor(value):
        if value.is_cpu and not is_strided(value):
            return _TENSOR_BYTES + int(sizeof(value))
        return _TENSOR_BYTES + int(value.nbytes)
    if isinstance(value, OnDevice):
        return nbytes(value.tensor)
    node = open_node(value)
    if node is None:
        # Sets and the like may hold arrays too, which sizeof counts.
        return int(sizeof(value))
    size = sys.getsizeof(value) + sum(map(nbytes, node.children))
    if not isinstance(value, (tuple, list)):
        size += sum(map(sys.getsizeof, node.keys))
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
