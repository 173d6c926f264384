"""The weights of a module: what they take, and from one device to another."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import TYPE_CHECKING, Any

from dask.sizeof import sizeof

from daskinfer.device.loading import load_torch
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
    torch = load_torch()
    return isinstance(function, torch.nn.Module) and not any(
        isinstance(part, torch.jit.ScriptModule) for part in function.modules()
    )


def move(module: torch.nn.Module, device: torch.device | str) -> None:
    """Move a module's parameters and buffers, bit by bit what they were.

    As ``module.to(device)``, except that what shares memory goes on to share it:
    that copies buffers of two names twice, and on NPUs tied weights too.

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
    with load_torch().no_grad():
        module._apply(_Mover(device))
    # What its class, or the device's vendor, does besides.
    module.to(device)


class _Mover:
    """Moves tensors, and what is the same tensor only once.

    No closure: those stay as long as the traceback of an error does.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._moved: dict[Hashable, tuple[Any, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        what, owner = _identity(tensor)
        if what not in self._moved:
            # With what owns the memory, so that no other can come to its place.
            self._moved[what] = owner, tensor.to(self._device)
        return self._moved[what][1]


def _identity(tensor: torch.Tensor) -> tuple[Hashable, Any]:
    """What two tensors have in common if they are the same, and what owns that."""
    if not is_strided(tensor):
        return id(tensor), tensor
    storage = tensor.untyped_storage()
    place = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
    return (storage._cdata, *place), storage
