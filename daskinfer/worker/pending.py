"""Results that are being computed on a worker, by what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from daskinfer.cache import CacheKey

#: What is found where there is nothing; None is a result like others.
MISSING: Any = object()


class Pending:
    """Results of one deployment that are being computed on this worker, or stored.

    A look-up takes time, in which a result may pass from here into the cache: whoever
    looks up is given what was here meanwhile, too.

    Notes
    -----
    For the event loop only.
    """

    def __init__(self) -> None:
        self._results: dict[CacheKey, asyncio.Future[Any]] = {}
        self._watching: list[dict[CacheKey, asyncio.Future[Any]]] = []

    def __repr__(self) -> str:
        return f"<Pending {len(self)}>"

    def __len__(self) -> int:
        return len(self._results)

    @contextmanager
    def watch(self) -> Iterator[dict[CacheKey, asyncio.Future[Any]]]:
        """Take down what leaves meanwhile; all of it is done."""
        left: dict[CacheKey, asyncio.Future[Any]] = {}
        self._watching.append(left)
        try:
            yield left
        finally:
            self._watching = [other for other in self._watching if other is not left]

    def find(self, key: CacheKey) -> asyncio.Future[Any] | None:
        """The result that somebody else computes; ``MISSING`` if it comes to nothing.

        Shield it: others wait for it as well.
        """
        return self._results.get(key)

    def begin(self, key: CacheKey) -> None:
        """It is computed from now on."""
        self._results[key] = asyncio.get_running_loop().create_future()

    def computed(self, key: CacheKey, value: Any) -> None:
        """It is there, or with ``MISSING`` will not be."""
        future = self._results[key]
        if not future.done():
            future.set_result(value)

    def end(self, keys: Iterable[CacheKey]) -> None:
        """It is in the cache, or nowhere."""
        for key in keys:
            self.computed(key, MISSING)
            future = self._results.pop(key)
            for left in self._watching:
                left[key] = future
