"""Which workers may be closed when there are more than are wanted.

Pure: the time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

#: Seconds for which a worker is given no requests once it was named to be closed. It is
#: told to leave within milliseconds, or will be named again.
HELD_OUT = 0.5


class Closing:
    """Workers that were named to be closed a moment ago.

    Examples
    --------
    >>> closing = Closing()
    >>> closing.name(["tcp://w:1"], now=1.0)
    >>> closing.named(now=1.2), closing.next()
    ({'tcp://w:1'}, 1.5)
    >>> closing.named(now=1.5), closing.next()
    (set(), inf)
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Closing {sorted(self._until)}>"

    def name(self, addresses: Iterable[str], now: float) -> None:
        """These are about to be closed, and no others."""
        self._until = dict.fromkeys(addresses, now + HELD_OUT)

    def named(self, now: float) -> set[str]:
        """Those that shall be given no requests."""
        for address, until in list(self._until.items()):
            if until <= now:
                del self._until[address]
        return set(self._until)

    def next(self) -> float:
        """When some of them may be given requests again."""
        return min(self._until.values(), default=math.inf)


def cover(
    ready: Mapping[str, Collection[str]],
    staying: Collection[str],
    worth: Callable[[str], float],
) -> set[str]:
    """Workers to keep so that everything that is served goes on being served.

    Parameters
    ----------
    ready
        By what is deployed, the workers that serve it.
    staying
        Those that will not be closed in any case.
    worth
        What each is worth keeping for, where several would do.

    Returns
    -------
    set of str
        Few of them, if not always the fewest.

    Examples
    --------
    >>> ready = {"m": ["a", "b"], "n": ["b", "c"], "o": ["d"], "p": []}
    >>> sorted(cover(ready, staying=["d"], worth=lambda worker: 0.0))
    ['b']
    >>> sorted(cover({"m": ["a", "b"]}, staying=[], worth={"a": 1, "b": 0}.get))
    ['a']
    """
    stays = set(staying)
    bare = [set(workers) for workers in ready.values() if not stays & set(workers)]
    bare = [workers for workers in bare if workers]
    kept: set[str] = set()
    while bare:
        best = max(
            sorted(set().union(*bare)),
            key=lambda worker: (sum(worker in some for some in bare), worth(worker)),
        )
        kept.add(best)
        bare = [workers for workers in bare if best not in workers]
    return kept
