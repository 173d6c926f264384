"""The results of one deployment that one worker keeps."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from daskinfer import config
from daskinfer.cache import CacheKey, TieredCache, TierPolicy
from daskinfer.cache.contents import isolate
from daskinfer.cache.gate import HitGate
from daskinfer.payload.tree import is_array, open_node
from daskinfer.worker.pending import MISSING, Pending

if TYPE_CHECKING:
    from daskinfer.caching import CachePolicy


#: As many are told to the scheduler of what is here.
MOST_REPORTED = 20_000
#: Bytes by which the scheduler knows a result.
ID_BYTES = 8

#: Objects of these classes cannot be changed, so they need not be copied.
_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), np.generic)


class NotCacheable(TypeError):
    """A result that nobody can copy for sure."""


class ResultCache:
    """Results by what was asked.

    Parameters
    ----------
    name
        The deployment.
    policy
        Its limits.
    directory
        Where the worker's caches are on disk; None: nowhere.

    Attributes
    ----------
    gate
        Whether it is worth asking. For the event loop only.
    counts
        ``"uncacheable"``: requests whose inputs, or results, have no stable content;
        ``"skipped"``: those that were not looked up as hits are too rare;
        ``"joined"``: those for which an identical one was computed at the same time.
        For the event loop only.
    pending
        What is being computed. For the event loop only.
    generation
        Counts how often it was cleared.

    Notes
    -----
    Values are copied on their way in and out: what a hit gives is the asker's own.
    Thread-safe where nothing else is said.
    """

    def __init__(
        self, name: str, policy: CachePolicy, directory: Path | None = None
    ) -> None:
        self.name = name
        self.policy = policy
        self.gate = HitGate()
        self.counts: Counter[str] = Counter()
        self.pending = Pending()
        self.generation = 0
        self._lock = threading.Lock()
        self._reported: set[bytes] = set()
        # It copies nothing: results are copied here, once each way, before they are
        # stored and so before anybody else may change them.
        self._tiers = TieredCache(
            directory and directory / _folder(name),
            tiers={"device": None, **policy.tiers(), **({} if directory else _NO_DISK)},
            copy=False,
        )

    @classmethod
    def configured(cls, name: str, policy: CachePolicy) -> ResultCache:
        """Open a cache where the configuration wants it."""
        directory = config.get("cache.directory")
        return cls(name, policy, directory and Path(directory).expanduser())

    def __repr__(self) -> str:
        return f"<ResultCache of {self.name!r}: {self._tiers!r}>"

    # Looking up and storing

    def key(self, digest: str, content: bytes) -> CacheKey:
        """What a result is found by: the deployment, the weights and the request."""
        return CacheKey.of(self.name, digest, content)

    def get(self, key: CacheKey) -> Any:
        """Return a result of the caller's own, or ``MISSING``."""
        value = self._tiers.get(key, default=MISSING)
        return value if value is MISSING else isolate(value)

    def put(self, key: CacheKey, value: Any, generation: int) -> bool:
        """Keep a result that belongs to nobody else; tell whether it could be kept.

        Parameters
        ----------
        key, value
            See :meth:`key` and :func:`copy_of`.
        generation
            That of the look-up before. What was cleared since stays away.
        """
        with self._lock:
            if generation != self.generation:
                return False
            return self._tiers.put(key, value) is not None

    def clear(self) -> None:
        """Forget all results, those on disk too."""
        with self._lock:
            self.generation += 1
            self._tiers.clear()

    # What the scheduler is told

    def told(self, keys: Iterable[CacheKey]) -> bytes:
        """Name results for the scheduler; none if it knows of too many already."""
        if len(self._reported) >= MOST_REPORTED:
            return b""
        return ids(keys)

    def stored(self, keys: Iterable[CacheKey]) -> None:
        """Note that what the scheduler was told is true."""
        if len(self._reported) < MOST_REPORTED:
            self._reported.update(key.digest[:ID_BYTES] for key in keys)

    def changes(self) -> tuple[bytes, bytes]:
        """What is here that was never told, and what was told and is gone."""
        here = {digest[:ID_BYTES] for digest in self._tiers.digests()}
        gone = self._reported - here
        self._reported -= gone
        room = MOST_REPORTED - len(self._reported)
        new = list(here - self._reported)[: max(room, 0)]
        self._reported.update(new)
        return b"".join(new), b"".join(gone)

    # Time and space

    def sweep(self) -> None:
        """Move down what has outlived its time; read what is on disk at first."""
        self._tiers.sweep()

    def is_overdue(self, now: float) -> bool:
        """Whether there is something to sweep."""
        deadline = self._tiers.next_deadline()
        return deadline is not None and deadline <= now

    @property
    def nbytes(self) -> int:
        """Bytes of this host's memory."""
        statistics = self._tiers.stats().tiers
        return sum(tier.nbytes for tier in statistics if tier.name in _IN_MEMORY)

    def shrink(self, nbytes: int) -> int:
        """Give memory back; return how much."""
        return self._tiers.shrink(nbytes)

    def close(self) -> None:
        """Write to disk what the next process can use."""
        self._tiers.close()

    def statistics(self, now: float) -> dict[str, Any]:
        """Plain data for :class:`~daskinfer.cache.totals.CacheStatus`."""
        return {
            "tiers": self._tiers.stats().to_dict(),
            "counts": dict(self.counts),
            "resting": not self.gate.is_open(now),
        }


_IN_MEMORY = frozenset(("host", "packed"))
_NO_DISK: dict[str, TierPolicy | None] = {"disk": None}


def ids(keys: Iterable[CacheKey]) -> bytes:
    """Name results as the scheduler knows them."""
    return b"".join([key.digest[:ID_BYTES] for key in keys])


def copy_of(value: Any) -> Any:
    """Return a copy of a result that shares nothing which could be changed.

    Raises
    ------
    NotCacheable
        It holds an object of an unknown class, which a copy would share.

    Examples
    --------
    >>> copy_of({"scores": (np.zeros(2), 1)})
    {'scores': (array([0., 0.]), 1)}
    >>> copy_of({"seen": set()})
    Traceback (most recent call last):
        ...
    daskinfer.worker.result_cache.NotCacheable: a set cannot be copied for sure
    """
    _check(value)
    return isolate(value)


def _check(value: Any) -> None:
    if isinstance(value, _IMMUTABLE) or is_array(value):
        return
    node = open_node(value)
    if node is None:
        raise NotCacheable(f"a {type(value).__name__} cannot be copied for sure")
    for child in node.children:
        _check(child)


def _folder(name: str) -> str:
    return f"results-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
