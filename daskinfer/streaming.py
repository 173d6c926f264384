"""What a model and its user may say of results that come piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Step"]


class Step(NamedTuple):
    """One yield of a generator that answers a batch, and which rows end with it.

    A generator that is called with a batch yields outputs with one row for each row of
    its input. Where some need fewer steps than others, it yields a ``Step``: the next
    outputs have rows for those alone that are not finished.

    Parameters
    ----------
    outputs
        Arrays with a row for each live row, in their order, in any containers.
    finished
        Whether it was the last one, for each row.

    Examples
    --------
    >>> import numpy as np
    >>> def count_down(start):
    ...     live = start
    ...     while len(live):
    ...         live = live - 1
    ...         yield Step(live, finished=live == 0)
    ...         live = live[live > 0]
    >>> [step.outputs.tolist() for step in count_down(np.array([2, 1, 3]))]
    [[1, 0, 2], [0, 1], [0]]
    """

    outputs: Any
    finished: Sequence[bool] | Any
