"""What a request's inputs look like, for a reader: kinds and shapes, no content."""

from __future__ import annotations

from typing import Any

from daskinfer.payload.tree import is_array, is_tensor, open_node

#: Longer outlines are cut.
_MAX_CHARS = 120
#: Children of a container that are shown, and how deep containers are opened.
_MAX_CHILDREN = 8
_MAX_DEPTH = 3

#: Told by their value, unless that is long.
_SMALL = frozenset({int, float, bool, type(None)})
_MAX_VALUE_CHARS = 24


def outline(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Tell what a model was called with, in about one line.

    Parameters
    ----------
    args, kwargs
        What the model was called with. Not changed.

    Returns
    -------
    str
        Arrays with dtype and shape, numbers by value, texts and other objects by
        their type alone; empty where there are no inputs.

    Examples
    --------
    >>> import numpy as np
    >>> outline((np.ones((1, 8), "float32"),), {})
    'ndarray float32 (1, 8)'
    >>> outline((["a", "b"], None, {"x": "text"}), {"top_k": 5})
    '[str, str], None, {x: str}, top_k=5'
    >>> outline((list(range(1000)),), {})
    '[0, 1, 2, 3, 4, 5, 6, 7, ... 1,000 in all]'
    """
    told = [_told(value, 0) for value in args[:_MAX_CHILDREN]]
    if len(args) > _MAX_CHILDREN:
        told.append(f"... {len(args):,} in all")
    told += [f"{name}={_told(value, 0)}" for name, value in kwargs.items()]
    text = ", ".join(told)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 4]} ..."


def _told(obj: Any, depth: int) -> str:
    kind = type(obj)
    if kind in _SMALL:
        # The digits of a huge integer take long, or are refused.
        value = "" if kind is int and abs(obj) >= 2**63 else repr(obj)
        return value if 0 < len(value) <= _MAX_VALUE_CHARS else kind.__name__
    if is_array(obj):
        dtype = str(obj.dtype)
        dtype = dtype.removeprefix("torch.") if is_tensor(obj) else dtype
        return f"{kind.__name__} {dtype} {tuple(obj.shape)}"
    node = open_node(obj)
    if node is None:
        return kind.__name__
    if depth >= _MAX_DEPTH:
        return f"{kind.__name__} of {len(node.children):,}"
    children = [_told(child, depth + 1) for child in node.children[:_MAX_CHILDREN]]
    named = not isinstance(obj, (tuple, list))
    if named:
        children = [
            f"{key}: {child}" for key, child in zip(node.keys, children, strict=False)
        ]
    if len(node.children) > _MAX_CHILDREN:
        children.append(f"... {len(node.children):,} in all")
    inside = ", ".join(children)
    if kind is list:
        return f"[{inside}]"
    if kind is dict:
        return f"{{{inside}}}"
    if kind is tuple:
        return f"({inside},)" if len(children) == 1 else f"({inside})"
    return f"{kind.__name__}({inside})"
