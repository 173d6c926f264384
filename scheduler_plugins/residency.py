"""Which workers have which results in their caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

#: Bytes by which a result is known.
ID_BYTES = 8
#: Results that are known of at most, over all workers.
MOST_KNOWN = 1_000_000


class Residency:
    """Remembers what workers report of their caches.

    Notes
    -----
    Pure. It may be wrong for a while: what a worker is believed to have may have left
    its cache, and is computed there then.

    Examples
    --------
    >>> residency = Residency()
    >>> residency.report("net", "tcp://10.0.0.1:1", b"result01result02", b"")
    >>> residency.report("net", "tcp://10.0.0.2:1", b"result02", b"")
    >>> residency.holders("net", b"result02")
    ('tcp://10.0.0.1:1', 'tcp://10.0.0.2:1')
    >>> residency.worker_lost("tcp://10.0.0.1:1")
    >>> residency.holders("net", b"result01"), len(residency)
    ((), 1)
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[str, bytes], tuple[str, ...]] = {}
        self._held: defaultdict[tuple[str, str], set[bytes]] = defaultdict(set)
        self._known = 0

    def __repr__(self) -> str:
        return f"<Residency {self._known} of {len(self._held)} caches>"

    def __len__(self) -> int:
        return self._known

    def holders(self, name: str, result: bytes) -> tuple[str, ...]:
        """The workers that have a result, in the order in which they came to it."""
        return self._holders.get((name, result), ())

    def report(self, name: str, address: str, added: bytes, dropped: bytes) -> None:
        """Take in what has come into a worker's cache, and what has left it."""
        held = self._held[name, address]
        for result in _each(dropped):
            self._drop(name, address, result, held)
        for result in _each(added):
            if result not in held and self._known < MOST_KNOWN:
                held.add(result)
                self._known += 1
                self._holders[name, result] = (*self.holders(name, result), address)

    def worker_lost(self, address: str) -> None:
        """A worker is gone."""
        for name, _ in [key for key in self._held if key[1] == address]:
            self._forget(name, address)

    def forget(self, name: str) -> None:
        """A deployment's results are gone."""
        for _, address in [key for key in self._held if key[0] == name]:
            self._forget(name, address)

    def _forget(self, name: str, address: str) -> None:
        held = self._held.pop((name, address))
        for result in list(held):
            self._drop(name, address, result, held)

    def _drop(self, name: str, address: str, result: bytes, held: set[bytes]) -> None:
        if result not in held:
            return
        held.discard(result)
        self._known -= 1
        left = tuple(a for a in self.holders(name, result) if a != address)
        if left:
            self._holders[name, result] = left
        else:
            del self._holders[name, result]


def _each(results: bytes) -> Iterator[bytes]:
    for start in range(0, len(results), ID_BYTES):
        yield results[start : start + ID_BYTES]
