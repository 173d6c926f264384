"""Tensors in Dask's own serializer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from daskinfer.transport.frames import Frame, dumps, loads

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Teach Dask's serializer every tensor: bfloat16, 8-bit floats, device tensors.

    Dask turns a tensor into an array, which fails for dtypes that NumPy lacks and
    for tensors on a device. This replaces its rule for :class:`torch.Tensor` in
    this process, on both sides of a connection; call it in clients, schedulers
    and workers alike. It does not import torch: without torch in the process, the
    rule is put in place when the first tensor comes by. May be called again.

    Notes
    -----
    Device tensors arrive on the CPU. A tensor keeps ``requires_grad`` and, if it is
    a leaf, its gradient.

    Examples
    --------
    >>> from distributed.protocol import deserialize, serialize
    >>> import torch
    >>> register()
    >>> deserialize(*serialize({"y": torch.ones(2, dtype=torch.bfloat16)}))
    {'y': tensor([1., 1.], dtype=torch.bfloat16)}
    """
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    for dispatch in (dask_serialize, dask_deserialize):
        # Dask registers its own rule under these same names: whichever library is
        # met first, ours comes after it.
        for library in ("torch", "torchvision"):
            dispatch.register_lazy(library, _register_tensor)
    if "torch" in sys.modules:
        _register_tensor()


def _register_tensor() -> None:
    import torch
    from distributed.protocol import torch as _  # noqa: F401  (its rules first)
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    dask_serialize.register(torch.Tensor, _serialize_tensor)
    dask_deserialize.register(torch.Tensor, _deserialize_tensor)


def _serialize_tensor(tensor: torch.Tensor) -> tuple[dict[str, Any], list[Frame]]:
    grad = tensor.grad if tensor.is_leaf else None
    return {}, dumps(tensor if grad is None else _WithGrad(tensor, grad))


def _deserialize_tensor(header: dict[str, Any], frames: list[Frame]) -> torch.Tensor:
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
