"""A plain tensor as the bits of its elements, for every dtype torch has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than a dtype, a shape and elements on the CPU."""
    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
    )


def elements(tensor: torch.Tensor) -> tuple[np.ndarray, str | None, bool]:
    """Take a plain tensor apart.

    Parameters
    ----------
    tensor
        One that :func:`is_plain`.

    Returns
    -------
    array : numpy.ndarray
        Its elements, sharing its memory where that is possible. If NumPy lacks the
        dtype, unsigned integers of the same width hold their bits.
    dtype : str or None
        The name of the dtype that NumPy lacks, such as ``"bfloat16"``.
    requires_grad : bool
        The tensor's flag.

    Examples
    --------
    >>> import torch
    >>> elements(torch.ones(2, dtype=torch.bfloat16))
    (array([16256, 16256], dtype=uint16), 'bfloat16', False)
    """
    requires_grad = tensor.requires_grad
    if requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    dtype = tensor.dtype
    carrier = _carriers().get(dtype)
    if carrier is None:
        return tensor.numpy(), None, requires_grad
    return tensor.contiguous().view(carrier).numpy(), str(dtype)[6:], requires_grad


def from_elements(
    array: np.ndarray, dtype: str | None, requires_grad: bool
) -> torch.Tensor:
    """Put a tensor together again from :func:`elements`, sharing the array's memory."""
    import torch

    tensor = torch.from_numpy(array)
    if dtype is not None:
        tensor = tensor.view(getattr(torch, dtype))
    return tensor.requires_grad_() if requires_grad else tensor


#: dtypes of the same name and layout in both libraries.
_COMMON_DTYPES = frozenset(
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 "
    "float16 float32 float64 complex64 complex128".split()
)


@functools.cache
def _carriers() -> dict[torch.dtype, torch.dtype]:
    """Each dtype that NumPy lacks, and the integers that carry its bits."""
    import torch

    integers = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return {
        dtype: integers[dtype.itemsize]
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and str(dtype)[6:] not in _COMMON_DTYPES
    }
