"""Tensors of the device: off it and back to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskinfer.cache.contents import OnDevice
from daskinfer.device.base import Device
from daskinfer.payload.tree import is_tensor, open_node


def off_host(value: Any) -> set[str]:
    """Name the devices other than the CPU on which tensors of a value lie."""
    if is_tensor(value):
        return set() if value.device.type == "cpu" else {str(value.device)}
    node = open_node(value)
    return set() if node is None else set().union(*map(off_host, node.children))


def to_host(value: Any, device: Device) -> Any:
    """Return a value whose tensors on the device are copied to the host, and marked.

    Waits for the work that produces them.
    """

    def change(leaf: Any) -> Any:
        if not is_tensor(leaf) or leaf.device.type == "cpu":
            return leaf
        return OnDevice(device.to_host(leaf).requires_grad_(leaf.requires_grad))

    with device.active():
        return _replace(value, change)


def to_device(value: Any, device: Device | None) -> Any:
    """Return a value whose marked tensors are on the device again.

    Without a device they stay on the CPU.
    """

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, OnDevice):
            return leaf
        tensor = leaf.tensor
        if device is None:
            return tensor
        fresh = device.put(tensor.detach())
        return fresh.requires_grad_() if tensor.requires_grad else fresh

    if device is None:
        return _replace(value, change)
    with device.active():
        fresh = _replace(value, change)
        # The copies may still run, and the host's memory be given to others.
        device.synchronize()
        return fresh


def _replace(tree: Any, change: Callable[[Any], Any]) -> Any:
    changed = change(tree)
    if changed is not tree:
        return changed
    node = open_node(tree)
    if node is None:
        return tree
    return node.rebuild([_replace(child, change) for child in node.children])
