"""The tier of files, which outlives its process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

from daskinfer.cache.clock import Clock
from daskinfer.cache.files import FileInfo, Files
from daskinfer.cache.keys import CacheKey
from daskinfer.cache.policy import TierPolicy
from daskinfer.cache.records import VERSION, CorruptError, Record, seal, unseal
from daskinfer.cache.tiers import Entry, Tier, UnstorableError
from daskinfer.failure import origin
from daskinfer.logs import Log

logger = Log("cache")

#: File systems give out space in blocks of this size.
_BLOCK = 4096
#: Seconds until writing is tried again after it has failed.
_RETRY = 60.0
#: Files dated later than now by more than this were made before the clock went back.
_TOLERANCE = 1.0


class Listed(NamedTuple):
    """A file as the index knows it: since when it lives, and its size in blocks."""

    born: float
    weight: int


class DiskTier(Tier):
    """Files in a directory, and an index of them.

    The index has the order of use and the sizes. It is made at first use, from the
    directory alone: no file is opened. Files that other processes write later are
    found by their names, and then listed too. A file stays where it is when a hit
    brings its entry up, so that the entry need not be written again, and is there
    after a crash.

    Ages of files are measured with the wall clock when they are met first, and from
    then on with the monotonic one. A file made in the future was made before the clock
    went back: nobody knows how old it is, and it is removed. For the rest, no time is
    earlier than the latest use of any file.

    Parameters
    ----------
    directory
        Where the files are.
    policy, clock
        As in :class:`Tier`.

    Raises
    ------
    OSError
        The directory cannot be used.
    """

    def __init__(self, directory: Path, policy: TierPolicy, clock: Clock) -> None:
        super().__init__("disk", policy, clock, self._remove_file, aging=True)
        self.files = Files(directory, VERSION)
        self._latest = -float("inf")
        self._scan_lock = threading.RLock()
        self._scanned = False
        self._retry_at = -float("inf")
        self._warned = False

    # The index

    def _remove_file(self, digest: bytes, _: Any) -> None:
        self.files.remove(digest.hex())

    def _born(self, created: float) -> float | None:
        """When, in monotonic time, an entry was put; None: too long ago, or unknown."""
        wall = self.clock.wall()
        self._latest = max(self._latest, wall)
        if created > wall + _TOLERANCE:
            return None
        age = max(self._latest - created, 0.0)
        return None if age >= self.policy.seconds else self.clock.monotonic() - age

    def _created(self, born: float) -> float:
        """When, in the time of the wall clock, an entry was put."""
        return self.clock.wall() - (self.clock.monotonic() - born)

    def scan(self) -> None:
        """Make the index, if that was not done; remove what is too old."""
        with self._scan_lock:
            if self._scanned:
                return
            try:
                found = sorted(self.files.scan(), key=lambda file: file.used)
            except OSError as error:
                self._degrade(error)
                return
            self._scanned = True
        self._latest = max([self._latest, *(file.used for file in found)])
        for file in found:
            self._list(file)

    def _list(self, file: FileInfo) -> None:
        born = self._born(file.created)
        if born is None:
            self.files.remove(file.stem, file.version)
        elif file.version == VERSION:
            digest = bytes.fromhex(file.stem)
            with self.entries.lock:
                if digest not in self.entries:
                    listed = Listed(born, _blocks(file.size))
                    self.entries.set_noevict(digest, listed)

    def everything(self) -> list[bytes]:
        """The digests of all files that are there, listed or not."""
        try:
            found = [f.stem for f in self.files.scan() if f.version == VERSION]
        except OSError as error:
            self._degrade(error)
            found = []
        return list({*self.digests(), *map(bytes.fromhex, found)})

    # Entries

    def find(self, key: CacheKey) -> Entry | None:
        """Read what a file holds for a key, if it is whole and not too old."""
        self.scan()
        digest = key.digest
        listed = self.entries.get(digest)
        try:
            data = self.files.read(digest.hex())
        except OSError as error:
            self._degrade(error)
            data = None
        if data is None:
            super().discard(digest)
            return None
        try:
            record = unseal(data)
        except CorruptError as error:
            logger.info("Removed the cached file %s: %s", digest.hex(), error)
            self.discard(digest)
            return None
        if record.full != key.full:
            return None
        born = self._born(record.created) if listed is None else listed.born
        if born is None:
            self.discard(digest)
            self.counts.add("expirations")
            return None
        if listed is None:
            self.entries.set_noevict(digest, Listed(born, _blocks(len(data))))
        self._touch(digest, born)
        return Entry(key, born, record.packed, record.packed.marked)

    def hold(self, entry: Entry) -> Entry:
        """Return an entry as bytes that can be read without pickle."""
        packed = entry.packed()
        if not packed.value.plain:
            raise UnstorableError("only pickle would bring it back")
        return packed

    def admit(self, entry: Entry) -> bool:
        """Write an entry, if its file is not there yet."""
        self.scan()
        digest = entry.key.digest
        if digest in self.entries and self._touch(digest, entry.born):
            return True
        if self.clock.monotonic() < self._retry_at:
            return False
        created = self._created(entry.born)
        try:
            parts = seal(Record(created, entry.key.full, self.hold(entry).value))
        except Exception as error:  # of the value's own code
            logger.debug("The disk cannot hold a value: %s", origin(error))
            return False
        size = _blocks(sum(map(len, parts)))
        if size > self.policy.nbytes:
            return False
        try:
            used = self.clock.wall()
            self.files.write(digest.hex(), parts, created=created, used=used)
        except OSError as error:
            self._degrade(error)
            return False
        self.entries.set_noevict(digest, Listed(entry.born, size))
        return True

    def _touch(self, digest: bytes, born: float) -> bool:
        """Note that a file was used; whether it is there."""
        created, used = self._created(born), self.clock.wall()
        return self.files.touch(digest.hex(), created=created, used=used)

    def discard(self, digest: bytes) -> bool:
        """Remove a file; whether it was there."""
        listed = super().discard(digest)
        # It may be another process's, which the index does not know.
        return self.files.remove(digest.hex()) or listed

    def _degrade(self, error: OSError) -> None:
        """Go on without writing for a while; say so once."""
        self._retry_at = self.clock.monotonic() + _RETRY
        if not self._warned:
            self._warned = True
            logger.warning(
                "The cache cannot use %s (%s). It goes on in memory, and tries again "
                "every %.0f s. Free space there, or set daskinfer.cache.directory to "
                "another place.",
                self.files.directory,
                error.strerror or error,
                _RETRY,
            )


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
