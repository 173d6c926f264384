"""Containers and arrays: what a payload is made of.

Containers are dicts (and other mutable mappings), tuples, named tuples, lists and
dataclass instances. They are rebuilt as what they were, with other children.
Everything else is a leaf. Arrays are NumPy's and torch's.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np

#: Types that are never containers, so that the common leaves are told cheaply.
_SCALARS = frozenset({str, int, float, bool, bytes, complex, type(None), np.ndarray})


def is_tensor(obj: object) -> bool:
    """Whether ``obj`` is a :class:`torch.Tensor`, without importing torch."""
    cls = getattr(sys.modules.get("torch"), "Tensor", None)
    return cls is not None and isinstance(obj, cls)


def is_array(obj: object) -> bool:
    """Whether ``obj`` is a :class:`numpy.ndarray` or a :class:`torch.Tensor`."""
    return isinstance(obj, np.ndarray) or is_tensor(obj)


class Node:
    """One container, opened.

    Parameters
    ----------
    template
        The container itself, never changed.
    keys
        Its keys, positions or field names, in order.
    children
        What it holds, parallel to ``keys``.
    """

    __slots__ = ("children", "keys", "template")

    def __init__(self, template: Any, keys: list[Any], children: list[Any]) -> None:
        self.template = template
        self.keys = keys
        self.children = children

    def __repr__(self) -> str:
        return f"<Node {type(self.template).__name__}: {self.keys}>"

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield each child with what one writes in Python to reach it."""
        is_dataclass = _is_dataclass(self.template)
        for key, child in zip(self.keys, self.children, strict=True):
            yield (f".{key}" if is_dataclass else f"[{key!r}]"), child

    def siblings(self, other: Any) -> list[Any]:
        """Return the children of ``other``, which has the same structure."""
        if _is_dataclass(self.template):
            return [getattr(other, key) for key in self.keys]
        return [other[key] for key in self.keys]

    def rebuild(self, children: list[Any]) -> Any:
        """Return a container like this one that holds ``children`` instead.

        Constructors of dataclasses and mappings are not run: the container is
        copied and refilled. So frozen dataclasses, default factories and classes
        with a constructor of their own keep what they are.
        """
        template = self.template
        cls = type(template)
        if cls is dict:
            return dict(zip(self.keys, children, strict=True))
        if cls is tuple or cls is list:
            return cls(children)
        if isinstance(template, tuple):
            make = getattr(cls, "_make", cls)
            return make(children)
        if isinstance(template, (MutableMapping, list)):
            fresh = copy.copy(template)
            for key, child in zip(self.keys, children, strict=True):
                fresh[key] = child
            return fresh
        fresh = copy.copy(template)
        for key, child in zip(self.keys, children, strict=True):
            object.__setattr__(fresh, key, child)
        return fresh


def open_node(obj: Any) -> Node | None:
    """Open ``obj`` if it is a container, a list included.

    Examples
    --------
    >>> open_node({"a": 1, "b": 2})
    <Node dict: ['a', 'b']>
    >>> open_node("text") is None
    True
    """
    cls = type(obj)
    if cls in _SCALARS:
        return None
    if isinstance(obj, (tuple, list)):
        return Node(obj, list(range(len(obj))), list(obj))
    if isinstance(obj, MutableMapping):
        return Node(obj, list(obj.keys()), list(obj.values()))
    if _is_dataclass(obj):
        # A field that is not set (init=False) is not there to be batched.
        names = [f.name for f in dataclasses.fields(obj) if hasattr(obj, f.name)]
        return Node(obj, names, [getattr(obj, name) for name in names])
    return None


def holds_arrays(obj: Any) -> bool:
    """Whether ``obj`` is an array or a container with one somewhere inside."""
    if is_array(obj):
        return True
    node = open_node(obj)
    return node is not None and any(map(holds_arrays, node.children))


def map_arrays(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``tree`` with ``function`` applied to each of its arrays.

    Parameters
    ----------
    tree
        Containers, arrays and anything else, which stays as it is.
    function
        Called with each :class:`numpy.ndarray` and :class:`torch.Tensor`.

    Examples
    --------
    >>> map_arrays({"x": np.ones(2), "n": 3}, lambda array: array.shape)
    {'x': (2,), 'n': 3}
    """
    if is_array(tree):
        return function(tree)
    node = open_node(tree)
    if node is None:
        return tree
    return node.rebuild([map_arrays(child, function) for child in node.children])


def copy_arrays(tree: Any) -> Any:
    """Return ``tree`` with arrays of its own."""
    return map_arrays(tree, own)


def own(array: Any) -> Any:
    """Return a copy of an array or tensor that shares its memory with nothing.

    A model may return what it keeps and fills anew at its next call, and may change
    what it is given.
    """
    if not is_tensor(array):
        return array.copy()
    array = array.detach()
    if not is_strided(array) or array.is_nested:
        return array.clone()
    import torch

    return array.clone(memory_format=torch.contiguous_format)


def is_strided(tensor: Any) -> bool:
    """Whether a tensor's elements lie in memory as those of an array do."""
    import torch

    return bool(tensor.layout is torch.strided)


def _is_dataclass(obj: Any) -> bool:
    # A mapping that is also a dataclass (the usual "model output") counts as a
    # mapping: setting its items keeps both in step.
    return (
        hasattr(type(obj), "__dataclass_fields__")
        and not isinstance(obj, (MutableMapping, tuple, list))
        and not isinstance(obj, type)
    )
