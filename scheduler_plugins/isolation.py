"""Finding the request under which workers die, and answering all others.

The scheduler cannot see which request of a batch took its worker with it. So the
batch comes back as groups that run as batches of their own; a group that dies
is divided again, until the request that did it is alone. That costs one worker for
the batch, one more for each level of groups, and one to be sure: ``2 + ceil(log8(n))``
deaths for one such request among n, in O(k log n) passes for k of them. Before it is
charged at all, up to ``BYSTANDER_LIMIT`` more may die of it.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

#: Parts into which a batch is divided. More mean fewer deaths of workers and more
#: passes for the innocent.
PARTS = 8
#: Losses of a worker on which a request was queued behind another batch, after which
#: it is suspected as well: the answer of that batch may have died with the worker,
#: so that the one behind it was running already.
BYSTANDER_LIMIT = 2


def divide(requests: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut a batch into parts of nearly equal size, in order.

    Examples
    --------
    >>> [len(part) for part in divide(range(20))]
    [2, 3, 2, 3, 2, 3, 2, 3]
    >>> [list(part) for part in divide("ab")]
    [['a'], ['b']]
    """
    total = len(requests)
    parts = min(PARTS, total)
    for i in range(parts):
        yield requests[i * total // parts : (i + 1) * total // parts]


def is_proven(solo: int, max_attempts: int) -> bool:
    """Whether a request that was alone when workers died is taken for the cause.

    Once could be chance: somebody kills a worker while a batch-mate of the true cause
    happens to run there.

    >>> [is_proven(solo, max_attempts=3) for solo in (1, 2)], is_proven(1, 1)
    ([False, True], True)
    """
    return solo >= min(2, max_attempts)
