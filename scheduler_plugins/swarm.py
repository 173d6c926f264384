"""Which worker fetches which chunk of some weights, and from whom.

Pure: what workers say in, who fetches what out.

The rule is BitTorrent's *rarest first* (B. Cohen, "Incentives build robustness in
BitTorrent", 2003), made by one who knows everything. The origin sends what nobody
else has; whatever some worker has comes from workers, and the origin helps out once
more where none of them has time.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

#: The source that has all chunks: the scheduler itself.
ORIGIN = ""


class Transfer(NamedTuple):
    """A worker fetches a chunk from a source."""

    worker: str
    chunk: int
    source: str


class Swarm:
    """Decides who fetches what from whom.

    Parameters
    ----------
    chunks
        How many there are.
    uploads
        Transfers that a source serves at the same time.
    downloads
        Transfers that a worker makes at the same time.
    origin_sends
        How often the origin sends each chunk at most, unless nobody else can.

    Attributes
    ----------
    sent
        How often each chunk was asked of the origin.

    Notes
    -----
    Sets of chunks are masks: whole numbers in which bit `i` stands for chunk `i`.

    Examples
    --------
    >>> swarm = Swarm(2, uploads=1)
    >>> swarm.wants("a")
    >>> swarm.wants("b")
    >>> swarm.decide()
    [Transfer(worker='a', chunk=0, source='')]
    >>> swarm.got("a", 0)
    >>> swarm.decide()
    [Transfer(worker='b', chunk=1, source=''), ...]
    """

    def __init__(
        self,
        chunks: int,
        *,
        uploads: int = 2,
        downloads: int = 4,
        origin_sends: int = 2,
    ) -> None:
        self.sent = [0] * chunks
        self._all = (1 << chunks) - 1
        self._uploads = uploads
        self._downloads = downloads
        self._origin_sends = origin_sends
        self._have: dict[str, int] = {}
        self._coming: dict[str, dict[int, str]] = {}
        self._avoided: dict[str, set[str]] = {}
        self._stalled: set[str] = set()
        # Chunks by how many workers have them.
        self._rarity = [self._all]
        # Chunks that the origin may still send.
        self._unsent = self._all
        self._busy: Counter[str] = Counter()
        self._served: Counter[str] = Counter()

    def __repr__(self) -> str:
        complete = sum(have == self._all for have in self._have.values())
        return (
            f"<Swarm chunks: {len(self.sent)} workers: {len(self._have)} "
            f"complete: {complete}>"
        )

    # Events

    def wants(self, worker: str, have: int = 0) -> None:
        """A worker wants all chunks, and passes on those that it has."""
        self.left(worker)
        self._have[worker] = 0
        self._coming[worker] = {}
        self._avoided[worker] = set()
        self._gain(worker, have & self._all)

    def got(self, worker: str, chunk: int) -> None:
        """A worker has got a chunk."""
        self._stalled.discard(worker)
        self._ended(worker, chunk)
        if worker in self._have:
            self._gain(worker, (1 << chunk) & self._all & ~self._have[worker])

    def failed(self, worker: str, chunk: int, source: str) -> None:
        """A worker could not get a chunk, or got it damaged."""
        self._stalled.discard(worker)
        # It may have been told of another source since: busy with this one, it did not
        # ask that, and says nothing more of this chunk.
        self._ended(worker, chunk)
        if source != ORIGIN and worker in self._avoided:
            self._avoided[worker].add(source)

    def stalled(self, worker: str) -> None:
        """A worker should have said something by now.

        Others do not count on what it is to get, and it gets nothing before it speaks.
        """
        for chunk in list(self._coming.get(worker, ())):
            self._ended(worker, chunk)
        self._stalled.add(worker)

    def left(self, worker: str) -> None:
        """A worker neither wants nor has anything any more.

        Those that fetch from it will tell that they failed.
        """
        if worker not in self._have:
            return
        for chunk in list(self._coming[worker]):
            self._ended(worker, chunk)
        self._lose(self._have.pop(worker))
        del self._coming[worker], self._avoided[worker]
        self._stalled.discard(worker)
        self._busy.pop(worker, None)
        self._served.pop(worker, None)

    def is_fetching(self, worker: str) -> bool:
        """Whether a worker is to say something about a transfer."""
        return bool(self._coming.get(worker))

    # Decisions

    def decide(self) -> list[Transfer]:
        """Return what shall be fetched from now on; each call returns what is new."""
        decided: list[Transfer] = []
        waiting = [
            worker
            for worker, have in self._have.items()
            if have != self._all and worker not in self._stalled
        ]
        # Who has least goes first, and everybody once before anybody twice.
        waiting.sort(key=lambda w: self._have[w].bit_count() + len(self._coming[w]))
        while waiting:
            more = []
            for worker in waiting:
                transfer = self._choose(worker)
                if transfer is not None:
                    self._begin(transfer)
                    decided.append(transfer)
                    more.append(worker)
            waiting = more
        return decided

    def _choose(self, worker: str) -> Transfer | None:
        coming = self._coming[worker]
        if len(coming) >= self._downloads:
            return None
        wanted = self._all & ~self._have[worker] & ~_mask(coming)
        if not wanted:
            return None
        sources = [
            other
            for other in self._have
            if other != worker and other not in self._avoided[worker]
        ]
        origin_free = self._busy[ORIGIN] < self._uploads
        if origin_free:
            orphans = wanted
            for other in sources:
                orphans &= ~(self._have[other] | _mask(self._coming[other]))
            if orphans:
                return Transfer(worker, self._rarest(orphans), ORIGIN)
        free = [s for s in sources if self._busy[s] < self._uploads]
        for source in sorted(free, key=lambda s: (self._busy[s], self._served[s])):
            if found := wanted & self._have[source]:
                return Transfer(worker, self._rarest(found), source)
        if origin_free and (again := wanted & self._unsent):
            return Transfer(worker, self._rarest(again), ORIGIN)
        return None

    def _rarest(self, chunks: int) -> int:
        for mask in self._rarity:
            if found := chunks & mask:
                return _lowest(found)
        raise AssertionError("every chunk is held by some number of workers")

    # Bookkeeping

    def _begin(self, transfer: Transfer) -> None:
        worker, chunk, source = transfer
        self._coming[worker][chunk] = source
        self._busy[source] += 1
        self._served[source] += 1
        if source == ORIGIN:
            self.sent[chunk] += 1
            if self.sent[chunk] >= self._origin_sends:
                self._unsent &= ~(1 << chunk)

    def _ended(self, worker: str, chunk: int) -> bool:
        source = self._coming.get(worker, {}).pop(chunk, None)
        if source is None:
            return False
        # A source that has left is not counted any more.
        if source == ORIGIN or source in self._have:
            self._busy[source] = max(self._busy[source] - 1, 0)
        return True

    def _gain(self, worker: str, gained: int) -> None:
        self._have[worker] |= gained
        if len(self._rarity) <= len(self._have):
            self._rarity.append(0)
        for holders in range(len(self._rarity) - 2, -1, -1):
            moved = self._rarity[holders] & gained
            self._rarity[holders] ^= moved
            self._rarity[holders + 1] |= moved

    def _lose(self, lost: int) -> None:
        for holders in range(1, len(self._rarity)):
            moved = self._rarity[holders] & lost
            self._rarity[holders] ^= moved
            self._rarity[holders - 1] |= moved


def _mask(chunks: dict[int, str]) -> int:
    mask = 0
    for chunk in chunks:
        mask |= 1 << chunk
    return mask


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
