"""One tier of a cache: an LRU with a budget and a time to live.

Each is ``zict.LRU`` over a :class:`TTL` over a dict. What a tier holds are entries in
its own form: tensors on the device, live objects, or bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zict import LRU

from daskinfer.cache.clock import Clock
from daskinfer.cache.contents import nbytes
from daskinfer.cache.keys import CacheKey
from daskinfer.cache.packing import Packed, pack, unpack
from daskinfer.cache.policy import TierPolicy
from daskinfer.cache.residence import to_device, to_host
from daskinfer.cache.statistics import COUNTED, Counter, TierStatistics
from daskinfer.cache.ttl import TTL
from daskinfer.device.base import Device
from daskinfer.failure import origin
from daskinfer.logs import Log

#: What an entry takes besides key and value: itself and its places in four dicts and
#: a heap, measured. Without it, many small entries would take far more than the budget.
ENTRY_BYTES = 700


logger = Log("cache")


class UnstorableError(Exception):
    """A tier cannot hold an entry; the next one may."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in the form of the tier that holds it.

    Parameters
    ----------
    key
        With its full description.
    born
        When it was put, in the time of the monotonic clock.
    value
        Live, on the host or the device, or a :class:`Packed`.
    marked
        Whether tensors in it belong on the device.
    nbytes
        What it takes in its tier, besides itself.
    """

    key: CacheKey
    born: float
    value: Any
    marked: bool = False
    nbytes: int = 0

    @property
    def weight(self) -> int:
        """Bytes that count towards a tier's budget."""
        return self.nbytes + len(self.key.full) + ENTRY_BYTES

    def live(self) -> Entry:
        """The entry with its value as an object on the host."""
        if not isinstance(self.value, Packed):
            return self
        return self.holding(unpack(self.value))

    def packed(self) -> Entry:
        """The entry with its value as bytes."""
        if isinstance(self.value, Packed):
            return self
        return self.holding(pack(self.value, self.marked))

    def holding(self, value: Any, nbytes: int = 0) -> Entry:
        """The entry with its value in another form."""
        return Entry(self.key, self.born, value, self.marked, nbytes)


class Tier(ABC):
    """What all tiers do.

    Parameters
    ----------
    name
        One of ``TIERS``.
    policy
        Its limits.
    clock
        What time it is.
    on_evict
        Called with digest and entry before an entry is taken out to make room.
    aging
        Whether the time to live counts from an entry's birth, as in the last tier, or
        from its last use.

    Notes
    -----
    Callers hold the lock of a key while they move its entry.
    """

    def __init__(
        self,
        name: str,
        policy: TierPolicy,
        clock: Clock,
        on_evict: Callable[[bytes, Any], None],
        *,
        aging: bool = False,
    ) -> None:
        self.name = name
        self.policy = policy
        self.clock = clock
        self.counts = Counter(*COUNTED)
        self.ages: TTL[bytes, Any] = TTL(
            {},
            policy.seconds,
            clock.monotonic,
            born=(lambda _, entry: float(entry.born)) if aging else None,
        )
        self.entries: LRU[bytes, Any] = LRU(
            policy.nbytes,
            self.ages,
            on_evict=on_evict,
            weight=lambda _, entry: float(entry.weight),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.entries}>"

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return int(self.entries.total_weight)

    @property
    def is_full(self) -> bool:
        """Whether it holds more than it may."""
        return self.nbytes > self.policy.nbytes

    @abstractmethod
    def hold(self, entry: Entry) -> Entry:
        """Return an entry in this tier's form, with its size.

        Raises
        ------
        Exception
            It has no such form.
        """

    def give(self, entry: Entry) -> Entry:
        """Return what this tier holds in a form that any other can take."""
        return entry

    def wants(self, entry: Entry) -> bool:
        """Whether an entry of this kind belongs here at all."""
        return True

    def admit(self, entry: Entry) -> bool:
        """Take an entry in if it can be held here; whether it was."""
        try:
            held = self.hold(entry)
        except Exception as error:  # of the value's own code, or the device
            logger.debug(
                "The tier %s cannot hold a value: %s", self.name, origin(error)
            )
            return False
        if held.weight > self.policy.nbytes:
            return False
        # Without the evictions that follow: each needs the lock of its own key.
        self.entries.set_noevict(entry.key.digest, held)
        return True

    def find(self, key: CacheKey) -> Entry | None:
        """Return what it holds for a key; using it makes it the last to be evicted."""
        entry: Entry | None = self.entries.get(key.digest)
        if entry is None or entry.key.full != key.full:
            return None
        return entry

    def discard(self, digest: bytes) -> bool:
        """Remove an entry; whether it was there."""
        try:
            del self.entries[digest]
        except KeyError:
            return False
        return True

    def evict(self, digest: bytes, reason: str) -> None:
        """Take an entry out, by way of ``on_evict``, and count why."""
        if digest in self.entries:
            self.entries.evict(digest)
            self.counts.add(reason)

    def digests(self) -> list[bytes]:
        """The digests of all that it holds, at one moment."""
        with self.entries.lock:
            return list(self.entries)

    def everything(self) -> list[bytes]:
        """The digests of all that is to be removed where the tier is cleared."""
        return self.digests()

    def peek(self, digest: bytes) -> Any:
        """Return what it holds without using it; None if nothing."""
        return self.ages.d.get(digest)

    def oldest(self) -> bytes | None:
        """The digest of the entry to evict next."""
        with self.entries.lock:
            return next(iter(self.entries.order), None)

    def statistics(self) -> TierStatistics:
        """What can be known of it."""
        return TierStatistics(
            self.name,
            len(self),
            self.nbytes,
            self.policy.nbytes,
            **self.counts.counts(),
        )


class DeviceTier(Tier):
    """Values with tensors on the device, as they are."""

    def __init__(self, device: Device, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = device

    def wants(self, entry: Entry) -> bool:
        """Whether tensors in it belong on the device."""
        return entry.marked

    def hold(self, entry: Entry) -> Entry:
        """Return an entry with its marked tensors on the device."""
        live = entry.live()
        size = nbytes(live.value)
        if size > self.policy.nbytes:
            raise UnstorableError(f"{size} bytes are too many")
        return live.holding(to_device(live.value, self.device), size)

    def give(self, entry: Entry) -> Entry:
        """Return an entry with its tensors on the host, marked."""
        return entry.holding(to_host(entry.value, self.device))


class HostTier(Tier):
    """Live objects."""

    def hold(self, entry: Entry) -> Entry:
        """Return an entry with its value as an object."""
        live = entry.live()
        return live.holding(live.value, nbytes(live.value))


class PackedTier(Tier):
    """Bytes in memory."""

    def hold(self, entry: Entry) -> Entry:
        """Return an entry with its value as bytes."""
        packed = entry.packed()
        return packed.holding(packed.value, len(packed.value.data))
