"""The states of requests that advance step by step: gathered for a step, and kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskinfer import payload
from daskinfer.exceptions import OutputMismatch
from daskinfer.payload import AmbiguousOutput
from daskinfer.wording import counted


@dataclass(slots=True, eq=False)
class _Block:
    """What one pass has returned: the states of requests, one after the other."""

    tree: Any
    rows: int
    #: States of equal shapes; None where the one request there is cannot be joined.
    signature: str | None
    #: Whose rows are still in use, and where they begin.
    starts: dict[Hashable, int] = field(default_factory=dict)


class States:
    """The states of all requests under way.

    Kept as passes return them, many requests in one tree: as long as nobody joins or
    leaves, a step costs one copy of the whole and no more.

    Parameters
    ----------
    axis
        The batch axis of states.

    Examples
    --------
    >>> import numpy as np
    >>> states = States()
    >>> states.put({"a": 1, "b": 2, "c": 1}, {"h": np.array([1, 2, 3, 4])})
    >>> states.joined(["a", "c"], pad_to=3)
    {'h': array([1, 4, 4])}
    """

    def __init__(self, axis: int = 0) -> None:
        self._axis = axis
        self._blocks: dict[Hashable, _Block] = {}
        self._sizes: dict[Hashable, int] = {}

    def __repr__(self) -> str:
        blocks = len(set(map(id, self._blocks.values())))
        return f"<States of {counted(len(self), 'request')} in {blocks} trees>"

    def __len__(self) -> int:
        return len(self._blocks)

    def family(self, key: Hashable) -> Hashable:
        """Equal for requests whose states can be joined; None for one that is alone."""
        return self._blocks[key].signature

    def put(
        self,
        sizes: dict[Any, int],
        tree: Any,
        padding: int = 0,
        *,
        is_alone: bool = False,
    ) -> None:
        """Keep what a pass has returned, in place of what was there before.

        Parameters
        ----------
        sizes
            Rows of each request, in the order of the pass.
        tree
            Their states.
        padding
            Rows at its end that belong to nobody.
        is_alone
            Whether the one request there shares with nobody, whatever its state is.

        Raises
        ------
        OutputMismatch
            If the states do not have these rows. What was there before stays.
        """
        rows = sum(sizes.values())
        signature, found = None, rows
        if not is_alone:
            signature, found = payload.measure((tree,), {}, self._axis)
        if signature is None and (len(sizes) > 1 or padding):
            raise AmbiguousOutput(
                f"the state is no tree of arrays with {counted(rows, 'row')} each "
                f"along axis {self._axis}, so requests cannot share it"
            )
        if signature is not None and found != rows + padding:
            raise OutputMismatch(
                f"the state has {counted(found, 'row')} along axis {self._axis} for "
                f"requests of {counted(rows + padding, 'row')}"
            )
        self.drop(sizes)
        block, start = _Block(tree, rows, signature), 0
        for key, size in sizes.items():
            block.starts[key] = start
            self._blocks[key], self._sizes[key] = block, size
            start += size

    def joined(self, keys: Sequence[Hashable], pad_to: int | None = None) -> Any:
        """Copy the states of some requests of one family into one tree.

        Parameters
        ----------
        keys
            Whose, in this order.
        pad_to
            Rows that it shall have; the last one is repeated.
        """
        first = self._blocks[keys[0]]
        if first.signature is None:
            return payload.copy_arrays(first.tree)
        parts: list[Any] = [((part,), {}) for part in self._parts(keys)]
        args, _ = payload.collate(parts, self._axis, pad_to)
        return args[0]

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Forget the states of some requests."""
        thinned: dict[int, _Block] = {}
        for key in keys:
            block = self._blocks.pop(key, None)
            if block is not None:
                del block.starts[key], self._sizes[key]
                thinned[id(block)] = block
        for block in thinned.values():
            live = sum(self._sizes[key] for key in block.starts)
            # Few would keep the memory of many.
            if 0 < live <= block.rows // 2:
                self._compact(block, live)

    def _compact(self, block: _Block, rows: int) -> None:
        keys = list(block.starts)
        block.tree, block.rows, start = self.joined(keys), rows, 0
        for key in keys:
            block.starts[key] = start
            start += self._sizes[key]

    def _parts(self, keys: Sequence[Hashable]) -> Iterable[Any]:
        """Views of the states, as few as there can be."""
        block, start, stop = self._blocks[keys[0]], 0, 0
        for key in keys:
            if self._blocks[key] is not block or block.starts[key] != stop:
                if start < stop:
                    yield self._slice(block.tree, start, stop)
                block = self._blocks[key]
                start = stop = block.starts[key]
            stop += self._sizes[key]
        yield self._slice(block.tree, start, stop)

    def _slice(self, tree: Any, start: int, stop: int) -> Any:
        args, _ = payload.slice_rows((tree,), {}, self._axis, start, stop)
        return args[0]
