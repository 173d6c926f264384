"""Looking for many, a few at a time.

Pure: the time in, who is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Looks:
    """Takes turns among those for whom something is looked for in vain.

    Parameters
    ----------
    pause
        Seconds between two looks for one of them, at least.
    at_once
        Looks in vain in that time, for all of them. Where there are more, each is
        looked for less often.

    Examples
    --------
    >>> looks, found = Looks(pause=1.0, at_once=2), []
    >>> def look(name: str, now: float) -> float:
    ...     found.append(name)
    ...     return now + 10.0
    >>> for now in (0.0, 1.0, 2.0):
    ...     again = looks.take({"a": "A", "b": "B", "c": "C"}, look, now)
    >>> found, again
    (['A', 'B', 'C', 'A', 'B'], 3.0)
    """

    def __init__(self, pause: float, at_once: int) -> None:
        self.pause = pause
        self._least = pause
        self._at_once = at_once
        self._next: dict[Hashable, float] = {}

    def __repr__(self) -> str:
        return f"<Looks for {len(self._next)}, every {self.pause:g} s>"

    def take(
        self, things: Mapping[K, T], look: Callable[[T, float], float], now: float
    ) -> float:
        """Look for those whose turn it is; return when to ask again.

        Parameters
        ----------
        things
            All of them, by something that tells them apart; the first come first.
        look
            ``look(thing, now)`` returns when to look again, or infinity if something
            was found or something has to happen first. It must not fail.
        now
            In seconds.
        """
        self._next = {key: at for key, at in self._next.items() if now < at}
        self.pause = self._least * math.ceil(len(things) / self._at_once)
        until, left = math.inf, self._at_once
        for key, thing in list(things.items()):
            again = self._next.get(key)
            if again is None:
                if not left:
                    return min(until, now + self._least)
                again = look(thing, now)
                if again < math.inf:
                    self._next[key] = now + self.pause
                    left -= 1
            until = min(until, again)
        return until
