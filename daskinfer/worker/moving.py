"""The weights of a module: what they take, and from one device to another."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import TYPE_CHECKING, Any

from dask.sizeof import sizeof

from daskinfer.artifact import is_module
from daskinfer.payload.tree import is_strided

if TYPE_CHECKING:
    import torch


def weigh(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers.

    Memory that they share, such as that of tied weights, counts once.

    Examples
    --------
    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> weigh(net)
    160
    >>> net[1].weight = net[0].weight
    >>> weigh(net)
    96
    """
    storages: dict[int, int] = {}
    others = 0
    for tensor in chain(module.parameters(), module.buffers()):
        if is_strided(tensor):
            storage = tensor.untyped_storage()
            # Several Python objects can stand for one storage.
            storages[storage._cdata] = storage.nbytes()
        else:
            others += int(sizeof(tensor))
    return sum(storages.values()) + others


def can_move(function: object) -> bool:
    """Whether a model is a module that leaves nothing behind when it is moved.

    TorchScript keeps constants where it was loaded.

    Examples
    --------
    >>> import torch
    >>> can_move(torch.nn.Linear(4, 4)), can_move(abs)
    (True, False)
    """
    if not is_module(function):
        return False
    import torch

    parts = function.modules()  # type: ignore[attr-defined]
    return not any(isinstance(part, torch.jit.ScriptModule) for part in parts)


def move(module: torch.nn.Module, device: torch.device | str) -> None:
    """Move a module's parameters and buffers, bit by bit what they were.

    As ``module.to(device)``, except that what is the same tensor stays the same tensor
    for buffers too.

    Parameters
    ----------
    module
        Nobody may use it meanwhile.
    device
        Where to.

    Raises
    ------
    Exception
        Whatever copying raises, where there is no memory for instance. Then some of
        the module has been moved, and some has not.

    Examples
    --------
    >>> import torch
    >>> net = torch.nn.Linear(2, 2)
    >>> move(net, "meta")
    >>> net.weight.device
    device(type='meta')
    """
    import torch

    moved: dict[Hashable, tuple[Any, torch.Tensor]] = {}

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        what, owner = _identity(tensor)
        if what not in moved:
            # With what owns the memory, so that no other can come to its place.
            moved[what] = owner, tensor.to(device)
        return moved[what][1]

    with torch.no_grad():
        module._apply(to_device)


def _identity(tensor: torch.Tensor) -> tuple[Hashable, Any]:
    """What two tensors have in common if they are the same, and what owns that."""
    if not is_strided(tensor):
        return id(tensor), tensor
    storage = tensor.untyped_storage()
    place = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
    return (storage._cdata, *place), storage
