"""Arrays to tensors and back, for a module that is given NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskinfer.payload.tree import is_tensor, map_arrays

if TYPE_CHECKING:
    import torch

#: What :func:`torch.from_numpy` takes, in native byte order.
_TENSOR_KINDS = frozenset("?biufc")


def to_tensors(tree: Any) -> tuple[Any, bool]:
    """Turn the arrays of a call into CPU tensors.

    Parameters
    ----------
    tree
        Containers of arrays; what is no array stays as it is.

    Returns
    -------
    tuple
        The tree with tensors, and whether the caller shall be answered in arrays:
        it gave arrays and no tensor.

        A tensor shares the array's memory if that is writable, contiguous and of
        native byte order. Otherwise it is a copy, so that a module which works in
        place never meets memory that must not change.

    Raises
    ------
    TypeError
        For arrays that have no tensor: objects, text, dates, records.

    Examples
    --------
    >>> to_tensors({"x": np.ones(2, "float32"), "k": 3})
    ({'x': tensor([1., 1.]), 'k': 3}, True)
    >>> to_tensors(np.array(["text"]))
    Traceback (most recent call last):
        ...
    TypeError: an array of dtype <U4 has no tensor equivalent; ...
    """
    kinds = set()

    def convert(array: Any) -> Any:
        if is_tensor(array):
            kinds.add("tensor")
            return array
        kinds.add("array")
        return _tensor(array)

    return map_arrays(tree, convert), kinds == {"array"}


def to_numpy(tree: Any) -> Any:
    """Turn the tensors of an output into arrays.

    Parameters
    ----------
    tree
        Containers of tensors on any device; what is no tensor stays as it is.

    Returns
    -------
    Any
        The tree with arrays that share the memory of CPU tensors. bfloat16 and the
        8-bit floats, which NumPy lacks, become float32; every value fits.

    Examples
    --------
    >>> import torch
    >>> to_numpy((torch.ones(2, dtype=torch.bfloat16), "label"))
    (array([1., 1.], dtype=float32), 'label')
    """
    return map_arrays(tree, lambda item: _array(item) if is_tensor(item) else item)


def _tensor(array: np.ndarray) -> torch.Tensor:
    import torch

    dtype = array.dtype
    usable = dtype.kind in _TENSOR_KINDS and dtype not in (
        np.longdouble,
        np.clongdouble,
    )
    if not usable:
        raise TypeError(
            f"an array of dtype {dtype} has no tensor equivalent; convert it to "
            "numbers first, or deploy a callable, which is given arrays as they are"
        )
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    shareable = (
        array.flags.writeable
        and array.flags.aligned
        and all(step >= 0 and step % dtype.itemsize == 0 for step in array.strides)
    )
    return torch.from_numpy(array if shareable else array.copy())


def _array(tensor: torch.Tensor) -> np.ndarray:
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    try:
        return tensor.numpy()
    except TypeError:
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        return tensor.to(wide).numpy()
