"""Tensors in Dask's own serializer, and their size in its accounts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from daskinfer.transport.frames import Frame, dumps, loads
from daskinfer.transport.tensors import is_plain

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Teach Dask's serializer every tensor: bfloat16, 8-bit floats, device tensors.

    Dask turns a tensor into an array, which fails for dtypes that NumPy lacks and
    for tensors on a device. This replaces its rule for :class:`torch.Tensor` in
    this process, on both sides of a connection; call it in clients, schedulers
    and workers alike. It does not import torch: without torch in the process, the
    rule is put in place when the first tensor comes by. May be called again.

    It also tells Dask how large a tensor is, which otherwise counts 80 bytes: a
    worker would neither spill tensors nor pause because of them.

    Notes
    -----
    What leaves this process can be read by one without this registration: a tensor
    that NumPy can hold goes in Dask's own form, and others pickled. Only what Dask
    could not send at all goes in a form of daskinfer's: 8-bit floats, and tensors
    on a device, and gradients, whose dtype NumPy lacks.

    Device tensors arrive on the CPU. A tensor keeps ``requires_grad`` and, if it is
    a leaf on the CPU, its gradient.

    Examples
    --------
    >>> from distributed.protocol import deserialize, serialize
    >>> import torch
    >>> register()
    >>> deserialize(*serialize({"y": torch.ones(2, dtype=torch.bfloat16)}))
    {'y': tensor([1., 1.], dtype=torch.bfloat16)}
    """
    from dask.sizeof import sizeof
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    for dispatch in (dask_serialize, dask_deserialize, sizeof):
        # Dask registers its own rule under these same names: whichever library is
        # met first, ours comes after it.
        for library in ("torch", "torchvision"):
            dispatch.register_lazy(library, _register_tensor)
    if "torch" in sys.modules:
        _register_tensor()


def _register_tensor() -> None:
    import torch
    from dask.sizeof import sizeof
    from distributed.protocol import torch as _  # noqa: F401  (its rules first)
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    dask_serialize.register(torch.Tensor, _serialize_tensor)
    dask_deserialize.register(torch.Tensor, _deserialize_tensor)
    sizeof.register(torch.Tensor, _sizeof_tensor)


def _sizeof_tensor(tensor: torch.Tensor) -> int:
    """Return the bytes of host memory that a tensor takes."""
    import torch

    size = sys.getsizeof(tensor)
    if not tensor.is_cpu:
        return size
    if tensor.layout is torch.sparse_coo:
        # Each element and its position.
        return size + tensor._nnz() * (tensor.element_size() + 8 * tensor.ndim)
    return size + int(tensor.nbytes)


def _serialize_tensor(tensor: torch.Tensor) -> tuple[dict[str, Any], list[Frame]]:
    from distributed.protocol.torch import serialize_torch_Tensor

    from_device = not (tensor.is_cpu or tensor.is_meta)
    if from_device:
        tensor = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    grad = tensor.grad if tensor.is_leaf else None
    if tensor.is_leaf and _has_array(tensor) and (grad is None or _has_array(grad)):
        return serialize_torch_Tensor(tensor)  # type: ignore[no-any-return]
    if grad is None and not from_device and _can_pickle(tensor):
        raise NotImplementedError("Dask then takes pickle")
    return {}, dumps(tensor if grad is None else _WithGrad(tensor, grad))


def _has_array(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than an array that NumPy can hold as it is."""
    if not is_plain(tensor):
        return False
    try:
        tensor.detach().numpy()
    except (RuntimeError, TypeError):
        return False
    return True


def _can_pickle(tensor: torch.Tensor) -> bool:
    """Whether torch itself can; it loses plain tensors of its rarer dtypes."""
    import torch

    return not is_plain(tensor) or tensor.dtype is torch.bfloat16 or _has_array(tensor)


def _deserialize_tensor(header: dict[str, Any], frames: list[Frame]) -> torch.Tensor:
    if "sub-header" in header:
        from distributed.protocol.torch import deserialize_torch_Tensor

        return deserialize_torch_Tensor(header, frames)  # type: ignore[no-any-return]
    value = loads(frames)
    if isinstance(value, _WithGrad):
        value.tensor.grad = value.grad
        value = value.tensor
    return value  # type: ignore[no-any-return]


class _WithGrad:
    """A leaf tensor and its gradient, which pickling a tensor would drop."""

    def __init__(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        self.tensor = tensor
        self.grad = grad
