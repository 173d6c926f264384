"""Models that wait in the host's memory, off their device, to be wanted again."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from zict import LRU

from daskinfer.device.allocator import return_memory

if TYPE_CHECKING:
    from daskinfer.worker.models import ResidentModel

#: Name and version.
Which: TypeAlias = "tuple[str, str]"


class Parking:
    """Models off the device; what was parked longest ago makes room for others.

    Parameters
    ----------
    budget
        Returns the bytes that they may take together, at this moment.
    on_evict
        Called with name and version of what goes to make room.

    Notes
    -----
    Thread-safe. Where a model goes its memory is freed, which may take a while.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> gone = []
    >>> parking = Parking(lambda: 10, gone.append)
    >>> model = SimpleNamespace(nbytes=6, digest="d", function=print)
    >>> parking.put(("m", "1"), model), parking.put(("m", "2"), model), gone
    (True, True, [('m', '1')])
    >>> parking.take(("m", "2"), "d") is model
    True
    """

    def __init__(
        self,
        budget: Callable[[], float],
        on_evict: Callable[[Which], None] = lambda which: None,
    ) -> None:
        self._budget = budget
        self._on_evict = on_evict
        self._lock = threading.RLock()
        self._counts = Counter(hits=0, misses=0, evictions=0)
        self._evicted: list[weakref.ref[object]] = []
        # The budget changes: it is told with every eviction.
        self._models: LRU[Which, ResidentModel] = LRU(
            math.inf,
            {},
            on_evict=self._note_evicted,
            weight=lambda _, model: float(model.nbytes),
        )

    def __repr__(self) -> str:
        return f"<Parking models: {len(self)} bytes: {self.nbytes:,}>"

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, which: object) -> bool:
        return which in self._models

    @property
    def nbytes(self) -> int:
        """Bytes that are parked."""
        return int(self._models.total_weight)

    def names(self) -> set[str]:
        """Deployments that have something here."""
        with self._lock:
            return {name for name, _ in self._models}

    # In and out

    def make_room(self, nbytes: int) -> bool:
        """Let go of others until so many bytes fit; False if they never will."""
        with self._lock:
            budget = self._budget()
            if nbytes > budget:
                return False
            self._evict_to(budget - nbytes)
            return True

    def put(self, which: Which, model: ResidentModel) -> bool:
        """Take a model in that is off its device; whether there is room for it."""
        with self._lock:
            self._models.discard(which)
            if not self.make_room(model.nbytes):
                return False
            self._models[which] = model
            return True

    def take(self, which: Which, digest: str) -> ResidentModel | None:
        """Take a model out, to be loaded; None if it is not there.

        One with another digest is another model: it goes.
        """
        with self._lock:
            model = self._models.pop(which, None)
            if model is not None and model.digest != digest:
                model = None
            self._counts["misses" if model is None else "hits"] += 1
            return model

    def drop(self, which: Which) -> ResidentModel | None:
        """Take a model out, to be forgotten; None if it is not there."""
        with self._lock:
            return self._models.pop(which, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._models.clear()

    # Memory

    def fit(self) -> None:
        """Let go of what the budget does not allow any more."""
        with self._lock:
            self._evict_to(max(self._budget(), 0))

    def shrink(self, nbytes: int) -> int:
        """Give so many bytes back at least, or all; return how many they were."""
        with self._lock:
            before = self.nbytes
            self._evict_to(max(before - nbytes, 0))
            freed = before - self.nbytes
        return_memory()
        return freed

    def stats(self) -> dict[str, int]:
        """What can be known: entries, bytes, hits, misses, evictions.

        Hits and misses are loads, by whether they found their model here.
        """
        with self._lock:
            return {"entries": len(self), "bytes": self.nbytes, **self._counts}

    def _evict_to(self, nbytes: float) -> None:
        self._models.evict_until_below_target(nbytes)
        evicted, self._evicted = self._evicted, []
        if any(reference() is not None for reference in evicted):
            # In a cycle with itself, as some modules are.
            gc.collect()

    def _note_evicted(self, which: Which, model: ResidentModel) -> None:
        self._counts["evictions"] += 1
        self._evicted.append(weakref.ref(model.function))
        self._on_evict(which)
