"""Weights that are on their way: some chunks are there, others not yet."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from typing import Protocol

from daskinfer.artifact.chunks import Chunks
from daskinfer.artifact.weights import aligned_zeros


class Partial(Protocol):
    """Where chunks are put as they come.

    Attributes
    ----------
    whole
        The chunks that are there, each verified.
    """

    chunks: Chunks
    whole: set[int]

    def write(self, index: int, data: memoryview) -> bool:
        """Keep a chunk if it is what it should be; whether it is."""

    def read(self, start: int, nbytes: int) -> bytes | memoryview:
        """Some bytes of chunks that are there."""

    def abandon(self) -> None:
        """Let go of it before it is complete."""


class MemoryPartial:
    """Weights that are gathered in memory, where no disk can be used.

    Parameters
    ----------
    chunks
        What is to come.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self.whole: set[int] = set()
        self.memory = aligned_zeros(chunks.size).data

    def __repr__(self) -> str:
        return f"<MemoryPartial {len(self.whole)} of {len(self.chunks)}>"

    def write(self, index: int, data: memoryview) -> bool:
        """Keep a chunk if it is what it should be; whether it is."""
        if not self.chunks.is_whole(index, data):
            return False
        self.memory[slice(*self.chunks.span(index))] = data
        self.whole.add(index)
        return True

    def read(self, start: int, nbytes: int) -> memoryview:
        """Some bytes of chunks that are there."""
        return self.memory[start : start + nbytes]

    def take_over(self, other: Partial) -> None:
        """Copy what another one has, as far as that can still be read."""
        for index in other.whole - self.whole:
            start, end = self.chunks.span(index)
            with contextlib.suppress(OSError):
                self.write(index, memoryview(other.read(start, end - start)))

    def abandon(self) -> None:
        """Nothing is left of it."""


class FilePartial:
    """Weights that are gathered in a file, which a process holds by its lock.

    The system drops the lock when the process lets go of the file or dies, however.
    What another process has left is looked through: whole chunks need not come again.

    Parameters
    ----------
    chunks
        What is to come.
    path
        The file, made if need be.
    publish
        Called with this, complete and verified, to give the file its name.

    Raises
    ------
    BlockingIOError
        If another process holds it.
    OSError
        If it cannot be written, or there is no room.
    """

    def __init__(
        self, chunks: Chunks, path: str, publish: Callable[[FilePartial], None]
    ) -> None:
        self.chunks = chunks
        self.path = path
        self.whole: set[int] = set()
        self._publish = publish
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)
        try:
            self._prepare()
        except BaseException:
            os.close(self.descriptor)
            raise

    def _prepare(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(self.descriptor, self.path):
            # Somebody has completed, or removed, what was opened.
            raise BlockingIOError(errno.EAGAIN, "it has just been moved", self.path)
        size = min(os.fstat(self.descriptor).st_size, self.chunks.size)
        os.ftruncate(self.descriptor, size)
        self._look_through()
        # Better to know now that there is no room than when all but the last came.
        try:
            os.posix_fallocate(self.descriptor, 0, self.chunks.size)
        except OSError:
            os.ftruncate(self.descriptor, size)  # or it would take what room there is
            raise

    def _look_through(self) -> None:
        for index in range(len(self.chunks)):
            start, end = self.chunks.span(index)
            if _next_data(self.descriptor, start) < end:
                found = os.pread(self.descriptor, end - start, start)
                if self.chunks.is_whole(index, found):
                    self.whole.add(index)

    def __repr__(self) -> str:
        return f"<FilePartial {len(self.whole)} of {len(self.chunks)}: {self.path!r}>"

    def write(self, index: int, data: memoryview) -> bool:
        """Keep a chunk if it is what it should be; whether it is."""
        if not self.chunks.is_whole(index, data):
            return False
        start, _ = self.chunks.span(index)
        while data.nbytes:
            written = os.pwrite(self.descriptor, data, start)
            data, start = data[written:], start + written
        self.whole.add(index)
        return True

    def read(self, start: int, nbytes: int) -> bytes:
        """Some bytes of chunks that are there."""
        return os.pread(self.descriptor, nbytes, start)

    def finish(self) -> memoryview:
        """Verify the whole, and give the file its name.

        Returns
        -------
        memoryview
            The file, mapped: changes to this memory do not change the file. As long as
            it is mapped, the file is locked against removal.

        Raises
        ------
        OSError
            If the file has something else than what was written to it. It is removed.
        """
        memory = mapped(self.descriptor, self.chunks.size)
        if not self.chunks.is_all_whole(memory):
            os.unlink(self.path)
            raise OSError(errno.EIO, "it does not hold what was written", self.path)
        # From here on others may read it, but none may write to it or remove it.
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        self._publish(self)
        return memory

    def abandon(self) -> None:
        """Let go of the file; what it has may be of use later."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def mapped(descriptor: int, size: int) -> memoryview:
    """Map a file into memory that is this process's own where it writes to it.

    Where nobody does, all processes that map the file share its memory.
    """
    return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)).cast("B")


def is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is still the one of a name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _next_data(descriptor: int, start: int) -> int:
    """Where, from some place on, a file has more than holes."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a file system that knows of no holes
            return start
        return sys.maxsize
