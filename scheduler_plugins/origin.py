"""Weights that clients have sent, in files that nobody else can open."""

from __future__ import annotations

import os
import tempfile
import threading
from typing import IO

import dask

from daskinfer.artifact.chunks import Chunks


class Spool:
    """The chunks of some weights, in a file without a name.

    It takes space below Dask's ``temporary-directory``, and is gone with its process,
    however that ends.

    Parameters
    ----------
    chunks
        What is to come.

    Raises
    ------
    OSError
        If there is no room for them.

    Notes
    -----
    Thread-safe: methods are called in threads, so that the event loop does not wait
    for the disk.

    Examples
    --------
    >>> spool = Spool(Chunks.of(memoryview(b"weights"), chunk_size=4))
    >>> spool.write(0, b"weig")
    True
    >>> spool.write(1, b"???"), spool.missing
    (False, [1])
    >>> spool.read(0, 4)
    b'weig'
    >>> spool.close()
    """

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self._missing = set(range(len(chunks)))
        self._lock = threading.Lock()
        directory = dask.config.get("temporary-directory")
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=0)
        try:
            os.posix_fallocate(self._file.fileno(), 0, chunks.size)
        except OSError:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"<Spool {self.chunks.key[:12]} missing: {len(self._missing)}>"

    @property
    def missing(self) -> list[int]:
        """Chunks that have not come yet."""
        return sorted(self._missing)

    def write(self, index: int, data: bytes | memoryview) -> bool:
        """Keep a chunk; whether it is the one that was announced."""
        if not self.chunks.is_whole(index, data):
            return False
        with self._lock:
            write_all(self._file.fileno(), data, self.chunks.span(index)[0])
        self._missing.discard(index)
        return True

    def read(self, start: int, nbytes: int) -> bytes:
        """Some of the bytes."""
        with self._lock:
            return os.pread(self._file.fileno(), nbytes, start)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._file.close()


def write_all(descriptor: int, data: bytes | memoryview, start: int) -> None:
    """Write all bytes to a place in a file, as the system may take them in parts."""
    left = memoryview(data)
    while left.nbytes:
        written = os.pwrite(descriptor, left, start)
        left, start = left[written:], start + written
