"""Many requests into one, and a part of a request that is too large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from daskinfer.payload.tree import holds_arrays, is_array, is_tensor, open_node, own
from daskinfer.wording import counted

#: What a model is called with: positional and keyword arguments.
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def collate(
    requests: Sequence[Call], batch_dim: int | None = 0, pad_to: int | None = None
) -> Call:
    """Join requests of one signature into a single call.

    Parameters
    ----------
    requests
        ``(args, kwargs)`` of each, all of one signature (see
        :func:`daskinfer.payload.measure`), at least one. Not changed.
    batch_dim
        The axis to join along. None: stack samples on a new axis 0.
    pad_to
        Rows the batch shall have; padding repeats its last row, which is data the
        model accepts. None: no padding.

    Returns
    -------
    tuple
        ``(args, kwargs)``. Arrays keep their kind and dtype, byte order included,
        and share no memory with the requests: a model may work in place. What is no
        array is that of the first request.

    Raises
    ------
    ValueError
        If the batch has more than ``pad_to`` rows, or must be padded with
        list elements although it has none.

    Examples
    --------
    >>> requests = [((np.array([1, 2]), ["a", "b"]), {}), ((np.array([3]), ["c"]), {})]
    >>> collate(requests, pad_to=4)
    ((array([1, 2, 3, 3]), ['a', 'b', 'c', 'c']), {})
    >>> collate([(({"x": 1},), {"k": 2}), (({"x": 3},), {"k": 2})], batch_dim=None)
    (({'x': [1, 3]},), {'k': 2})
    """
    args, kwargs = requests[0]
    joiner = _Joiner(batch_dim, pad_to)
    joined_args = tuple(
        joiner.join([request[0][i] for request in requests]) for i in range(len(args))
    )
    joined_kwargs = {
        name: joiner.join([request[1][name] for request in requests], keyword=True)
        for name in kwargs
    }
    return joined_args, joined_kwargs


class _Joiner:
    """Joins the values that stand at one place in each request."""

    __slots__ = ("batch_dim", "pad_to")

    def __init__(self, batch_dim: int | None, pad_to: int | None) -> None:
        self.batch_dim = batch_dim
        self.pad_to = pad_to

    def join(self, values: list[Any], keyword: bool = False) -> Any:
        first = values[0]
        if is_array(first):
            return self.arrays(values)
        if keyword and not holds_arrays(first):
            return first
        if isinstance(first, list) and not keyword and not holds_arrays(first):
            return self.lists(values)
        node = open_node(first)
        if node is not None:
            columns = zip(*(node.siblings(value) for value in values), strict=True)
            return node.rebuild(
                [self.join(list(column), keyword) for column in columns]
            )
        if self.batch_dim is None and not keyword and first is not None:
            return self.lists(values)
        return first

    def lists(self, values: list[Any]) -> list[Any]:
        if self.batch_dim is None:
            rows = list(values)
        else:
            rows = [row for value in values for row in value]
        padding = self.padding(len(rows))
        if padding and not rows:
            raise ValueError(
                f"a batch of 0 rows cannot be padded to {self.pad_to}: "
                "there is no element to repeat in an empty list"
            )
        return rows + rows[-1:] * padding

    def arrays(self, arrays: list[Any]) -> Any:
        axis = self.batch_dim
        if axis is None:
            arrays = arrays + arrays[-1:] * self.padding(len(arrays))
            return _stack(arrays)
        if not arrays[0].ndim:
            return own(arrays[0])
        padding = self.padding(sum(array.shape[axis] for array in arrays))
        if padding:
            arrays = [*arrays, _repeat_last_row(arrays, axis, padding)]
        return concatenate(arrays, axis)

    def padding(self, rows: int) -> int:
        if self.pad_to is None:
            return 0
        if rows > self.pad_to:
            raise ValueError(
                f"a batch of {counted(rows, 'row')} cannot be padded to {self.pad_to}"
            )
        return self.pad_to - rows


def slice_rows(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_dim: int,
    start: int,
    stop: int,
) -> Call:
    """Return the call that holds only rows ``start`` to ``stop`` of a request.

    Parameters
    ----------
    args, kwargs
        A request with a signature. Not changed.
    batch_dim
        The axis that carries its rows. (Stacked samples have nothing to slice.)
    start, stop
        The half-open range of rows.

    Returns
    -------
    tuple
        ``(args, kwargs)`` whose arrays are views.

    Examples
    --------
    >>> slice_rows((np.arange(5), list("abcde")), {"k": 2}, 0, 1, 3)
    ((array([1, 2]), ['b', 'c']), {'k': 2})
    """
    rows = slice(start, stop)

    def cut(value: Any, keyword: bool = False) -> Any:
        if is_array(value):
            return value[(slice(None),) * batch_dim + (rows,)] if value.ndim else value
        if isinstance(value, list) and not keyword and not holds_arrays(value):
            return value[rows]
        node = open_node(value)
        if node is None:
            return value
        return node.rebuild([cut(child, keyword) for child in node.children])

    sliced = {name: cut(value, keyword=True) for name, value in kwargs.items()}
    return tuple(map(cut, args)), sliced


def concatenate(arrays: list[Any], axis: int) -> Any:
    """Concatenate arrays of one kind and dtype along an axis that they have."""
    if is_tensor(arrays[0]):
        import torch

        return torch.cat(arrays, axis)
    # Without dtype=, NumPy would turn a foreign byte order into its own.
    return np.concatenate(arrays, axis, dtype=arrays[0].dtype)


def _stack(arrays: list[Any]) -> Any:
    if is_tensor(arrays[0]):
        import torch

        return torch.stack(arrays)
    return np.stack(arrays, dtype=arrays[0].dtype)


def _repeat_last_row(arrays: list[Any], axis: int, times: int) -> Any:
    filled = [array for array in arrays if array.shape[axis]]
    if not filled:
        return _zeros(arrays[0], axis, times)
    source = filled[-1]
    index: list[Any] = [slice(None)] * source.ndim
    index[axis] = slice(source.shape[axis] - 1, None)
    row = source[tuple(index)]
    shape = list(source.shape)
    shape[axis] = times
    return row.expand(shape) if is_tensor(row) else np.broadcast_to(row, shape)


def _zeros(like: Any, axis: int, rows: int) -> Any:
    shape = list(like.shape)
    shape[axis] = rows
    return like.new_zeros(shape) if is_tensor(like) else np.zeros(shape, like.dtype)
