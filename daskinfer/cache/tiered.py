"""Tiers on top of each other: one cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from daskinfer.cache.build import policies
from daskinfer.cache.clock import Clock
from daskinfer.cache.contents import isolate, nbytes
from daskinfer.cache.keys import CacheKey
from daskinfer.cache.ladder import MISSING, Ladder
from daskinfer.cache.policy import TierPolicy, bytes_of
from daskinfer.cache.residence import off_host, to_host
from daskinfer.cache.statistics import CacheStatistics, Counter
from daskinfer.cache.tiers import Entry
from daskinfer.device.base import Device
from daskinfer.failure import origin
from daskinfer.logs import Log

logger = Log("cache")

#: Entries that a put moves down because their time is over. More than one, to keep up
#: with what is put; few, so that nobody waits.
_SWEPT_PER_PUT = 2


class TieredCache:
    """A cache of values in tiers: device, host, packed and disk.

    An entry is put into the fastest tier that can hold it. When that becomes too full,
    the entry that was not used for longest goes down one tier; so does one that was
    not used for its time to live. A hit brings an entry up again. The last tier's time
    to live counts from when an entry was put and ends it, in whatever tier it is. So a
    value that was put is found again, or is missing; it is never another one.

    ``device``
        tensors on the accelerator: only with a `device` that is one, and for values
        with tensors there
    ``host``
        live objects
    ``packed``
        bytes in memory, compressed
    ``disk``
        files, for values that are data alone (arrays, tensors, simple types and
        containers of these): only with a `directory`; they survive the process

    Parameters
    ----------
    directory : path, optional
        Where the disk tier makes its folder; the configuration's if left out. If it
        cannot be used, a warning says why, and there is no disk tier.
    device : Device, optional
        The accelerator; see :func:`daskinfer.device.open_device`.
    tiers : mapping, optional
        A `TierPolicy` for each tier that shall differ from the configuration; None
        leaves that tier out.
    copy : bool
        Whether values are copied when they are put and when they are given from
        memory, so that nobody changes the cache's own. Without it, callers promise to
        change nothing.
    clock : Clock, optional
        What tells the time.

    Raises
    ------
    TypeError, ValueError
        A tier is unknown, or its policy is none.

    Notes
    -----
    All methods may be called from any thread. Moving an entry takes the lock of
    its key alone, so that reading one does not wait while another is packed or written.

    No thread runs in the background: what has outlived its time is found when it is
    looked up, moved a few entries with each put, or all at once by `sweep`.

    Examples
    --------
    >>> import numpy as np
    >>> cache = TieredCache(tiers={"host": TierPolicy("1 MiB", "1m")})
    >>> cache.put("greeting", {"x": np.arange(3)})
    'host'
    >>> cache.get("greeting")
    {'x': array([0, 1, 2])}
    >>> cache.get("farewell", default="not there")
    'not there'
    >>> cache.stats().hit_rate
    0.5
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        device: Device | None = None,
        tiers: Mapping[str, TierPolicy | None] | None = None,
        copy: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or Clock()
        self._copy = copy
        self._device = None if device is None or device.kind == "cpu" else device
        self._counts = Counter("hits", "misses", "dropped")
        self._closed = False
        self._ladder = Ladder(
            policies(tiers or {}), self._device, directory, self._clock, copy
        )

    @property
    def _largest(self) -> int:
        return max((tier.policy.nbytes for tier in self._ladder.tiers), default=0)

    def __repr__(self) -> str:
        tiers = self._ladder.tiers
        held = ", ".join(f"{tier.name}: {len(tier)}" for tier in tiers)
        return f"<TieredCache {held or 'without tiers'}>"

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Looking up, storing, deleting

    def get(
        self,
        key: CacheKey | str | bytes,
        tiers: Iterable[str] | None = None,
        default: Any = None,
    ) -> Any:
        """Return the value of a key.

        Parameters
        ----------
        key
            What it was put under.
        tiers
            The tiers to look at, and to move the entry between; all if left out.
            Where a thread must not wait for the disk, name the others.
        default
            What to return if it is not there.

        Raises
        ------
        TypeError, ValueError
            The key is none, or a tier is unknown.
        """
        key = CacheKey.coerce(key)
        chosen = self._ladder.among(tiers)
        value = self._ladder.look_up(key, () if self._closed else chosen)
        self._counts.add("misses" if value is MISSING else "hits")
        return default if value is MISSING else value

    def put(
        self, key: CacheKey | str | bytes, value: Any, tier: str | None = None
    ) -> str | None:
        """Store a value, instead of the one that is there.

        Parameters
        ----------
        key
            What to find it by.
        value
            Anything. Not stored are tensors on a device other than the cache's, and
            what is larger than every tier or can be neither copied nor measured.
        tier
            The tier to put it in, or below if it does not fit; the first if left out.

        Returns
        -------
        str or None
            The name of the tier that took it; None if none could.

        Raises
        ------
        TypeError, ValueError
            The key is none, or the tier is unknown.
        """
        key = CacheKey.coerce(key)
        ladder = self._ladder
        chosen = ladder.tiers if tier is None else ladder.down_from(tier)
        if self._closed:
            return None
        place = ladder.put(key, self._entry(key, value), chosen)
        if place is None:
            self._counts.add("dropped")
        ladder.sweep(self._clock.monotonic(), _SWEPT_PER_PUT)
        ladder.trim()
        return place

    def delete(self, key: CacheKey | str | bytes) -> bool:
        """Remove a key from all tiers; whether it was there."""
        return self._ladder.discard(CacheKey.coerce(key).digest)

    def clear(self) -> None:
        """Remove all that is there now, files of other processes too."""
        for tier in self._ladder.tiers:
            for digest in tier.everything():
                self._ladder.discard(digest)

    def digests(self, tiers: Iterable[str] | None = None) -> set[bytes]:
        """The digests of all keys that are there, in some tiers or in any.

        For reports on what can be found here: nothing counts as used. Of files, those
        that this process knows of.
        """
        chosen = self._ladder.among(tiers)
        return {digest for tier in chosen for digest in tier.digests()}

    def stats(self) -> CacheStatistics:
        """What can be known of the cache, tier by tier."""
        tiers = tuple(tier.statistics() for tier in self._ladder.tiers)
        return CacheStatistics(tiers, **self._counts.counts())

    # Time and space

    def sweep(self, now: float | None = None) -> int:
        """Move down or remove all entries that have outlived their time.

        Parameters
        ----------
        now
            The time of the monotonic clock; the present if left out.

        Returns
        -------
        int
            How many.
        """
        if self._ladder.disk is not None:
            self._ladder.disk.scan()
        moved = self._ladder.sweep(self._clock.monotonic() if now is None else now)
        self._ladder.trim()
        return moved

    def next_deadline(self) -> float | None:
        """When, by the monotonic clock, `sweep` will have something to do.

        None if never, as things are. One timer, set anew after each sweep, is enough.
        """
        deadlines = [tier.ages.next_deadline() for tier in self._ladder.tiers]
        return min((when for when in deadlines if when is not None), default=None)

    def shrink(self, amount: float | str) -> int:
        """Give back memory of this host: move what is used least to disk, or drop it.

        Parameters
        ----------
        amount
            Bytes, a text such as ``"100 MiB"``, or as a float of at most 1.0 the share
            of what the cache holds in memory.

        Returns
        -------
        int
            Bytes that were given back.

        Raises
        ------
        TypeError, ValueError
            The amount is neither, or negative.
        """
        memory = self._ladder.among(("host", "packed"))
        before = sum(tier.nbytes for tier in memory)
        goal = before - bytes_of(amount, before)
        # Others may put meanwhile: each entry goes down two tiers at most.
        for _ in range(2 * sum(map(len, memory))):
            if sum(tier.nbytes for tier in memory) <= goal:
                break
            lowest = next((tier for tier in reversed(memory) if len(tier)), None)
            if lowest is not None:
                self._ladder.evict_oldest(lowest)
        self._ladder.trim()
        return max(0, before - sum(tier.nbytes for tier in memory))

    def flush(self) -> None:
        """Write to disk what memory holds, so that the next process starts with it."""
        if self._ladder.disk is None:
            return
        for tier in self._ladder.memory:
            for digest in tier.digests():
                self._ladder.write(tier, digest)
                self._ladder.trim()

    def close(self) -> None:
        """Flush, and let go of all memory; the cache stays empty from then on."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        for tier in self._ladder.memory:
            for digest in tier.digests():
                with self._ladder.lock(digest):
                    tier.discard(digest)

    def _entry(self, key: CacheKey, value: Any) -> Entry | None:
        try:
            places = off_host(value)
            if places:
                if self._device is None or places != {str(self._device.torch_device)}:
                    return None
                value = to_host(value, self._device)
            if nbytes(value) > self._largest:
                return None  # before it is copied
            if self._copy:
                value = isolate(value)
        except Exception as error:  # the value's own code, or the device
            logger.info(
                "A value of type %s is not cached: %s", type(value), origin(error)
            )
            return None
        return Entry(key, self._clock.monotonic(), value, marked=bool(places))
