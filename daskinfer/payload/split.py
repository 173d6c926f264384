"""One output into one per request, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from daskinfer.exceptions import OutputMismatch
from daskinfer.payload.collate import concatenate
from daskinfer.payload.tree import (
    Node,
    holds_arrays,
    is_array,
    is_strided,
    is_tensor,
    map_arrays,
    open_node,
    own,
)
from daskinfer.transport.tensors import elements, from_elements, is_plain
from daskinfer.wording import counted


class AmbiguousOutput(OutputMismatch):
    """A list of arrays can be read in two ways, and both fit this batch.

    A list of n arrays of n rows each may hold one entry per row, or be a container
    of n outputs that have the batch axis. With another number of rows only one
    reading fits, so running the requests one by one gives the answer.
    """


def split(
    output: Any,
    sizes: Sequence[int],
    batch_dim: int | None = 0,
    pad_to: int | None = None,
) -> list[Any]:
    """Divide a model's output among the requests of its batch.

    Parameters
    ----------
    output
        What the model returned: arrays with the batch axis, lists with one entry
        per row, None (each request's answer is None), in any containers.
    sizes
        Rows of each request, in the order in which they were joined.
    batch_dim
        The axis along which the requests were joined. None: each request was one
        sample, and gets its entry without the axis.
    pad_to
        Rows the batch was padded to; what belongs to the padding is dropped.

    Returns
    -------
    list
        One output per request, in the containers of ``output``. Arrays own their
        memory: nothing keeps the whole batch alive, and none is an inference
        tensor (if called outside ``torch.inference_mode``).

    Raises
    ------
    OutputMismatch
        If a part of the output cannot be divided; the message names it.
    AmbiguousOutput
        If a list of arrays can be read in two ways that differ; see there.

    Notes
    -----
    With ``batch_dim=None`` a list always holds one entry per sample. A model with
    several outputs returns them in a tuple or a dict.

    Examples
    --------
    >>> import numpy as np
    >>> split({"logits": np.array([0.5, 0.25, 0.125])}, [1, 2])
    [{'logits': array([0.5])}, {'logits': array([0.25 , 0.125])}]
    >>> split(["cat", "dog", "dog"], [1, 1], batch_dim=None, pad_to=3)
    ['cat', 'dog']
    >>> split({"loss": np.zeros((4, 2))}, [1, 2])
    Traceback (most recent call last):
        ...
    daskinfer.exceptions.OutputMismatch: output['loss'] has shape (4, 2), \
so axis 0 has 4 rows for a batch of 3 (requests of 1, 2 rows)...
    """
    return _Splitter(sizes, batch_dim, pad_to).split(output, "output")


class _Splitter:
    __slots__ = ("axis", "bounds", "rows", "sizes", "stacked")

    def __init__(
        self, sizes: Sequence[int], batch_dim: int | None, pad_to: int | None
    ) -> None:
        self.sizes = sizes
        self.stacked = batch_dim is None
        self.axis = batch_dim or 0
        ends = list(accumulate(sizes))
        self.bounds = list(zip([0, *ends], ends, strict=False))
        self.rows = ends[-1] if pad_to is None else pad_to

    def split(self, value: Any, path: str) -> list[Any]:
        if value is None:
            return [None] * len(self.sizes)
        if is_array(value):
            return self.array(value, path)
        if isinstance(value, list) and self.holds_rows(value, path):
            return self.entries(value)
        node = open_node(value)
        if node is None:
            raise OutputMismatch(
                f"{path} is {_describe(value)}, which has no batch axis; return an "
                f"array or a list of {self.batch}"
            )
        return self.node(node, path)

    def node(self, node: Node, path: str) -> list[Any]:
        columns = [self.split(child, path + label) for label, child in node]
        if not columns:
            return [node.rebuild([]) for _ in self.sizes]
        return [node.rebuild(list(row)) for row in zip(*columns, strict=True)]

    def array(self, array: Any, path: str) -> list[Any]:
        self.check(array, path)
        if self.stacked:
            return [map_arrays(array[i], own) for i in range(len(self.sizes))]
        if self.whole:
            return [own(array)]
        if is_tensor(array) and is_plain(array):
            # Slices and copies cost NumPy a fraction of what they cost torch.
            array, dtype, flag = elements(array)
            return [from_elements(item, dtype, flag) for item in self.pieces(array)]
        return self.pieces(array)

    def check(self, array: Any, path: str) -> None:
        """Refuse an array that cannot be divided among the requests."""
        if _is_exotic(array):
            if self.whole and not self.stacked:
                return
            raise OutputMismatch(
                f"{path} is a sparse or nested tensor, which cannot be divided among "
                f"a batch of {self.batch}; return a dense one"
            )
        if not self.fits(array):
            shape = tuple(array.shape)
            problem = (
                f"so it has no axis {self.axis}"
                if self.axis >= len(shape)
                else f"so axis {self.axis} has {counted(shape[self.axis], 'row')}"
            )
            stack = (
                ""
                if self.stacked
                else "; inputs without a batch axis need BatchPolicy(batch_dim=None)"
            )
            raise OutputMismatch(
                f"{path} has shape {shape}, {problem} for a batch of {self.batch}; "
                f"each output must have as many rows as the input along axis "
                f"{self.axis}{stack}"
            )

    def pieces(self, array: Any) -> list[Any]:
        before = (slice(None),) * self.axis
        return [own(array[(*before, slice(*bound))]) for bound in self.bounds]

    def entries(self, rows: list[Any]) -> list[Any]:
        rows = [map_arrays(row, own) for row in rows[: self.bounds[-1][1]]]
        if self.stacked:
            return rows
        return [rows[start:stop] for start, stop in self.bounds]

    def holds_rows(self, value: list[Any], path: str) -> bool:
        """Whether a list has one entry per row, or else is a container."""
        return _holds_rows([(self, value)], path, either=not self.whole)

    def fits(self, array: Any) -> bool:
        shape = array.shape
        return len(shape) > self.axis and bool(shape[self.axis] == self.rows)

    def all_fit(self, value: Any) -> bool:
        if is_array(value):
            return self.fits(value)
        node = open_node(value)
        return node is None or all(map(self.all_fit, node.children))

    @property
    def whole(self) -> bool:
        """Whether one request gets everything."""
        return len(self.sizes) == 1 and self.sizes[0] == self.rows

    @property
    def batch(self) -> str:
        """The batch, in words."""
        padded = "" if self.rows == sum(self.sizes) else ", padded"
        if len(self.sizes) == 1:
            return f"{self.rows} (a request of {counted(self.sizes[0], 'row')}{padded})"
        some = ", ".join(map(str, self.sizes[:8])) + (", ..." * (len(self.sizes) > 8))
        return f"{self.rows} (requests of {some} rows{padded})"


def join_outputs(
    outputs: Sequence[Any], sizes: Sequence[int], batch_dim: int = 0
) -> Any:
    """Join the outputs of the passes into which one large request was divided.

    Parameters
    ----------
    outputs
        One output per pass, all of the same structure; padding removed.
    sizes
        Rows of each pass.
    batch_dim
        The axis along which the request was divided.

    Returns
    -------
    Any
        What one pass over the whole request would have returned.

    Raises
    ------
    OutputMismatch
        If the passes returned different structures or arrays without the axis.

    Examples
    --------
    >>> import numpy as np
    >>> join_outputs([(np.array([1, 2]), ["a", "b"]), (np.array([3]), ["c"])], [2, 1])
    (array([1, 2, 3]), ['a', 'b', 'c'])
    """
    splitters = [_Splitter([size], batch_dim, None) for size in sizes]

    def join(values: list[Any], path: str) -> Any:
        first = values[0]
        if len({type(value) for value in values}) > 1:
            names = ", ".join(sorted({type(value).__name__ for value in values}))
            raise OutputMismatch(
                f"{path} is of different types in the passes of one request: {names}"
            )
        if first is None:
            return None
        if is_array(first):
            for splitter, value in zip(splitters, values, strict=True):
                splitter.check(value, path)
            return concatenate(values, batch_dim)
        if isinstance(first, list) and _holds_rows(
            list(zip(splitters, values, strict=True)), path
        ):
            return [row for value in values for row in value]
        node = open_node(first)
        if node is None:
            raise OutputMismatch(f"{path} is {_describe(first)}, without a batch axis")
        columns = zip(*(node.siblings(value) for value in values), strict=True)
        return node.rebuild(
            [
                join(list(column), path + label)
                for (label, _), column in zip(node, columns, strict=True)
            ]
        )

    return join(list(outputs), "output")


def _holds_rows(
    passes: list[tuple[_Splitter, list[Any]]], path: str, either: bool = True
) -> bool:
    """Whether a list holds one entry per row in every pass, or is a container.

    ``either`` says whether it matters which, should both readings fit.
    """
    splitter, value = passes[0]
    is_rows = all(len(value) == splitter.rows for splitter, value in passes)
    may_be_container = not splitter.stacked and any(
        holds_arrays(value) for _, value in passes
    )
    is_container = may_be_container and all(
        splitter.all_fit(value) for splitter, value in passes
    )
    if is_rows and is_container and either:
        raise AmbiguousOutput(
            f"{path} is {_told(value)} whose arrays have as many rows, for "
            f"a batch of {splitter.batch}: it may hold one entry per row or "
            "several outputs; return a tuple for several outputs, or one array instead "
            "of a list of rows"
        )
    if is_rows or is_container:
        return not is_container
    wanted = (
        f"one entry per row, or several outputs with as many rows as the input along "
        f"axis {splitter.axis}"
        if may_be_container
        else "one entry per row"
    )
    raise OutputMismatch(
        f"{path} is {_told(value)} for a batch of {splitter.batch}; return {wanted}"
    )


def _is_exotic(array: Any) -> bool:
    return is_tensor(array) and (array.is_nested or not is_strided(array))


def _told(entries: list[Any]) -> str:
    return f"a list of {counted(len(entries), 'entry', 'entries')}"


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 40 else text[:36] + '...'}"
