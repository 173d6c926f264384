"""The weights of models in files, which the workers of a host share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from daskinfer.artifact.chunks import Chunks
from daskinfer.artifact.partial import FilePartial, is_at, mapped
from daskinfer.cache.files import Files
from daskinfer.logs import Log

logger = Log("store")

#: Part of every file's name: files of another version are left alone.
VERSION = 1

_KEY = re.compile(r"[0-9a-f]{64}")
_PART = ".part"

#: Device, inode, size and time of change: what differs when a file was written to.
_Signature: TypeAlias = "tuple[int, int, int, int]"


@dataclass(frozen=True, slots=True)
class Held:
    """Weights that are verified, in memory that nobody else writes to.

    Parameters
    ----------
    memory
        They themselves. Where it is a mapped file, processes share it as long as
        nobody writes to it, and the file is not removed as long as it is mapped.
    was_there
        Whether the file was whole when it was asked for, so that nothing was fetched.
    """

    memory: memoryview = field(repr=False)
    _path: str | None = None
    _signature: _Signature | None = None
    was_there: bool = False

    def is_unchanged(self) -> bool:
        """Whether nobody has written to the file since it was verified."""
        if self._path is None or self._signature is None:
            return True
        try:
            now = _signature(os.lstat(self._path))
        except OSError:
            return True  # removed: what is mapped stays as it is
        return now == self._signature or now[:2] != self._signature[:2]


class Store:
    """Weights by the key of their chunks, in a directory for this user alone.

    A file with weights begins as a partial one, which the process that writes it
    holds by a lock. When all chunks are there and verified, it gets its name. So what
    has a name is whole, unless the disk damages it: then it is found by its hashes when
    a process opens it for the first time, and removed.

    Parameters
    ----------
    directory
        Made if it is not there; its mode becomes 0700.
    budget
        Bytes that files may take. Beyond that, those that were not used for longest
        are removed, but none that some process uses.

    Raises
    ------
    OSError
        The directory cannot be made or written, is no directory, or is another user's.

    Notes
    -----
    Thread-safe, and safe with other processes on the same directory.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> store, weights = Store(Path(folder.name, "store"), 2**20), memoryview(b"abc")
    >>> chunks = Chunks.of(weights)
    >>> store.open(chunks) is None
    True
    >>> partial = store.begin(chunks)
    >>> partial.write(0, weights)
    True
    >>> bytes(store.finish(partial).memory), bytes(store.open(chunks).memory)
    (b'abc', b'abc')
    >>> folder.cleanup()
    """

    def __init__(self, directory: Path, budget: int) -> None:
        self._files = Files(directory, VERSION)
        self._budget = budget
        self._verified: dict[str, _Signature] = {}
        self.trim()

    def __repr__(self) -> str:
        return f"<Store {str(self.directory)!r}>"

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self._files.directory

    # Whole weights

    def open(self, chunks: Chunks) -> Held | None:
        """Map the file of some weights; None if there is none that is whole.

        Raises
        ------
        OSError
            There is one, and it cannot be read.
        """
        path = self._files.path(chunks.key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            # Held for as long as the file is mapped.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not is_at(descriptor, path):
                return None
            return self._verify(descriptor, path, chunks)
        except BlockingIOError:
            return None  # it is just being removed
        finally:
            os.close(descriptor)

    def _verify(self, descriptor: int, path: str, chunks: Chunks) -> Held | None:
        status = os.fstat(descriptor)
        signature = _signature(status)
        if status.st_size == chunks.size:
            memory = mapped(descriptor, chunks.size)
            known = self._verified.get(chunks.key) == signature
            if known or chunks.is_all_whole(memory):
                self._verified[chunks.key] = signature
                _touch(path, status.st_mtime_ns)
                return Held(memory, path, signature, was_there=True)
        logger.warning("Removed %s, which is damaged", path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return None

    def read(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of a file, not verified; None if it is not there.

        Raises
        ------
        OSError
            It is there, and cannot be read.
        """
        if not _KEY.fullmatch(key):
            return None
        try:
            descriptor = os.open(
                self._files.path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except FileNotFoundError:
            return None
        try:
            return os.pread(descriptor, nbytes, start)
        finally:
            os.close(descriptor)

    # Weights on their way

    def begin(self, chunks: Chunks, *, alone: bool = False) -> FilePartial | None:
        """Begin to write weights, or go on where another process has died.

        Parameters
        ----------
        chunks
            What is to come.
        alone
            Whether to write a file of one's own, whoever else writes the same.

        Returns
        -------
        FilePartial or None
            None if another process is at it, or has just completed them.

        Raises
        ------
        OSError
            If there is no room, or the directory cannot be written.
        """
        path = self._partial(chunks)
        if alone:
            path = f"{self._files.path(chunks.key)}.{secrets.token_hex(8)}.tmp"
        self.trim(chunks.size)
        try:
            return self._begin(chunks, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        self.trim(self._budget)
        return self._begin(chunks, path)

    def _begin(self, chunks: Chunks, path: str) -> FilePartial | None:
        try:
            partial = FilePartial(chunks, path, self._publish)
        except BlockingIOError:
            return None
        if os.path.lexists(self._files.path(chunks.key)):
            # Whoever did not find them may have looked just before they were there.
            os.unlink(path)
            partial.abandon()
            return None
        return partial

    def wait(self, chunks: Chunks) -> None:
        """Wait as long as another process writes to weights that it has begun.

        Raises
        ------
        OSError
            If the file system has no locks.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self._partial(chunks), flags)
            try:
                # Those who wait do not wait for each other.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            finally:
                os.close(descriptor)

    def last_written(self, chunks: Chunks) -> float | None:
        """When another process last wrote to weights that it has begun."""
        try:
            return os.lstat(self._partial(chunks)).st_mtime
        except FileNotFoundError:
            return None

    def finish(self, partial: FilePartial) -> Held:
        """Verify complete weights, and give their file its name.

        Raises
        ------
        OSError
            If that fails.
        """
        memory = partial.finish()
        signature = _signature(os.fstat(partial.descriptor))
        self._verified[partial.chunks.key] = signature
        partial.abandon()
        return Held(memory, self._files.path(partial.chunks.key), signature)

    def _partial(self, chunks: Chunks) -> str:
        return self._files.path(chunks.key) + _PART

    def _publish(self, partial: FilePartial) -> None:
        os.replace(partial.path, self._files.path(partial.chunks.key))

    # Room

    def trim(self, room: int = 0) -> None:
        """Remove files that nobody uses until so many more bytes are in the budget."""
        listed = sorted(self._list(), key=lambda file: file.used)
        total = sum(file.size for file in listed)
        for file in listed:
            if total + room <= self._budget:
                return
            if _remove_unused(file.path):
                total -= file.size

    def _list(self) -> Iterator[_Listed]:
        for file in self._files.scan():
            path = os.path.join(self.directory, f"{file.stem}.v{file.version}")
            yield _Listed(path, file.size, file.used)
        for partial in self.directory.glob(f"*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                status = partial.lstat()
                yield _Listed(str(partial), status.st_size, status.st_mtime)


class _Listed(NamedTuple):
    path: str
    size: int
    used: float


def _signature(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _touch(path: str, changed: int) -> None:
    """Note that a file is used now."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), changed), follow_symlinks=False)


def _remove_unused(path: str) -> bool:
    """Remove a file unless some process holds it; whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(descriptor, path):
            os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
