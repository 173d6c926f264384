"""A private directory of files that are either whole or not there.

:class:`zict.File` writes files in place, reads every value to learn their sizes and
lets a file that another process removed be an error. Here a file appears under its
name at once and complete, listing costs one ``stat`` per file, and processes share
the directory.

A file is not forced to the medium (``fsync``): it outlives its process in any case,
and one that a power failure tears is found by its checksum, which is cheaper than
waiting for each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MODE = 0o700
_NAME = re.compile(r"(?P<stem>[0-9a-f]{32,128})\.v(?P<version>[0-9]+)")
_UNFINISHED = re.compile(r"[0-9a-f]{32,128}\.v[0-9]+\.[0-9a-f]{16}\.tmp")

#: No file takes so long to write.
_UNFINISHED_SECONDS = 3600.0


class FileInfo(NamedTuple):
    """What listing tells of a file: its hash, version and size, and two times."""

    stem: str
    version: int
    size: int
    created: float
    used: float


class Files:
    """Files named by hashes, in a directory that only this user may enter.

    Parameters
    ----------
    directory
        Made if it is not there; its mode becomes 0700.
    version
        Of the files' format, a part of their names.

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
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = Files(Path(folder, "cache"), version=1)
    ...     files.write("00" * 16, [b"con", b"tent"], created=0.0, used=0.0)
    ...     files.read("00" * 16), files.read("ff" * 16)
    (b'content', None)
    """

    def __init__(self, directory: Path, version: int) -> None:
        self.directory = directory
        self.version = version
        self._prepare()

    def __repr__(self) -> str:
        return f"<Files {str(self.directory)!r} v{self.version}>"

    def _prepare(self) -> None:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.directory.mkdir(_MODE)
        status = os.lstat(self.directory)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{self.directory} is not a directory")
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{self.directory} belongs to another user")
        if stat.S_IMODE(status.st_mode) != _MODE:
            self.directory.chmod(_MODE)
        if not os.access(self.directory, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"{self.directory} is not writable")

    def path(self, stem: str) -> str:
        """Where a file is, or would be."""
        return os.path.join(self.directory, f"{stem}.v{self.version}")

    def read(self, stem: str) -> bytes | None:
        """Return the content of a file; None if there is none.

        Raises
        ------
        OSError
            It is there and cannot be read.
        """
        try:
            with open(self.path(stem), "rb", 0, opener=_open_itself) as file:
                return file.readall()
        except FileNotFoundError:
            return None

    def write(
        self,
        stem: str,
        parts: Sequence[bytes | memoryview],
        *,
        created: float,
        used: float,
    ) -> None:
        """Put a file in place, instead of one that is there.

        Parameters
        ----------
        stem
            The hash that names it.
        parts
            Its content, one after the other.
        created, used
            Its times, which :meth:`scan` gives again.

        Raises
        ------
        OSError
            It cannot be written. Then nothing has changed.
        """
        try:
            self._write(stem, parts, (used, created))
        except FileNotFoundError:
            # Somebody has removed the directory, or took the new file for a leftover
            # in the moment before it was locked.
            self._prepare()
            self._write(stem, parts, (used, created))

    def _write(
        self,
        stem: str,
        parts: Sequence[bytes | memoryview],
        times: tuple[float, float],
    ) -> None:
        path = self.path(stem)
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600)
        try:
            with open(descriptor, "wb") as file:
                # Held until the process lets go or dies, it tells others that this
                # file is not a leftover. A file system without locks says so by age.
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.writelines(parts)
                file.flush()
                os.utime(descriptor, times)
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def touch(self, stem: str, *, created: float, used: float) -> bool:
        """Note that a file was used; whether it is there."""
        try:
            os.utime(self.path(stem), (used, created), follow_symlinks=False)
        except OSError:
            return False
        return True

    def remove(self, stem: str, version: int | None = None) -> bool:
        """Remove a file; whether it was there."""
        path = os.path.join(
            self.directory, f"{stem}.v{self.version if version is None else version}"
        )
        # What cannot be removed is removed by its age, or never served.
        try:
            os.unlink(path)
        except OSError:
            return False
        return True

    def scan(self) -> Iterator[FileInfo]:
        """Yield all files, of other versions too, and remove unfinished ones.

        Raises
        ------
        OSError
            The directory cannot be read.
        """
        try:
            entries = os.scandir(self.directory)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                if match := _NAME.fullmatch(entry.name):
                    # It may have vanished in the meantime.
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield FileInfo(
                            match["stem"],
                            int(match["version"]),
                            status.st_size,
                            status.st_mtime,
                            status.st_atime,
                        )
                elif _UNFINISHED.fullmatch(entry.name):
                    _remove_if_left(entry.path)


def _open_itself(path: str, flags: int) -> int:
    # Neither what a link points to, nor a date of use that is not ours.
    return os.open(path, flags | os.O_NOFOLLOW | getattr(os, "O_NOATIME", 0))


def _remove_if_left(path: str) -> None:
    """Remove a file whose writer is dead: nobody holds its lock."""
    # Its writer, or another reader of the directory, may be faster.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if _is_left(descriptor):
                os.unlink(path)
        finally:
            os.close(descriptor)


def _is_left(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks.
        return time.time() - os.fstat(descriptor).st_mtime > _UNFINISHED_SECONDS
    return True
