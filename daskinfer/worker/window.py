"""How much of a stream may be on its way to a reader that has not taken it. Pure."""

from __future__ import annotations

import math
from collections import deque


class Window:
    """Counts the chunks that were sent and not read yet.

    A chunk that is larger than the window goes when nothing else is unread.

    Parameters
    ----------
    nbytes, chunks
        How much may be unread.
    first
        The number of the first chunk that is sent.

    Examples
    --------
    >>> window = Window(nbytes=100, chunks=8)
    >>> window.send(60), window.admits(60)
    (None, False)
    >>> window.taken(1)
    >>> window.admits(1000)
    True
    """

    def __init__(self, nbytes: float, chunks: float, first: int = 0) -> None:
        self._nbytes = nbytes
        self._chunks = chunks
        self._read = first
        self._unread: deque[int] = deque()
        self._unread_bytes = 0

    def __repr__(self) -> str:
        return f"<Window unread: {len(self._unread)} of {self._unread_bytes} bytes>"

    @classmethod
    def endless(cls) -> Window:
        """One for what nobody reads piece by piece."""
        return cls(math.inf, math.inf)

    def admits(self, nbytes: int) -> bool:
        """Whether a chunk may be sent."""
        if not self._unread:
            return True
        return (
            len(self._unread) < self._chunks
            and self._unread_bytes + nbytes <= self._nbytes
        )

    def send(self, nbytes: int) -> None:
        """A chunk is sent."""
        self._unread.append(nbytes)
        self._unread_bytes += nbytes

    def taken(self, count: int) -> None:
        """The reader has taken so many chunks by now, counted from the very first."""
        while self._read < count and self._unread:
            self._unread_bytes -= self._unread.popleft()
            self._read += 1

    def open(self) -> None:
        """Whatever is unread, more may be sent from now on."""
        self._nbytes = self._chunks = math.inf
