"""One stream on a worker: what is to be sent of it, and what is kept."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask.sizeof import sizeof
from dask.typing import Key

from daskinfer.worker.results import pack_all
from daskinfer.worker.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskinfer.protocol import Pack, StreamOrder
    from daskinfer.worker.producing import Emission

_NOTHING: Pack = {"header": b"", "frames": []}


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks of one stream that are sent together."""

    key: Key
    first: int
    count: int
    nbytes: int
    more: bool
    pack: Pack


class Live:
    """A stream that has begun, and is not told to have ended.

    Parameters
    ----------
    key
        The request.
    order
        What its reader wants; None: there is none, but somebody wants the whole.

    Attributes
    ----------
    count
        How many chunks the model has given.
    ended, error
        Whether the model gives no more, and why, if it did not end by itself.
    dropped
        Whether nobody wants anything of it any more.
    is_read
        Whether somebody reads it chunk by chunk.
    """

    def __init__(self, key: Key, order: StreamOrder | None) -> None:
        self.key = key
        self.count = 0
        self.ended = False
        self.error: BaseException | None = None
        self.dropped = False
        self._order = order
        self._is_told = False
        self.is_read = order is not None and order["read"]
        self._keeps = order is None or order["keep"]
        self._kept: list[Any] = []
        self._unsent: deque[tuple[Any, int]] = deque()
        self._skip = 0 if order is None else order["skip"]
        self._sent = self._skip
        self._waits_for_reader = self.is_read
        self._window = Window(
            0 if order is None else order["nbytes"],
            0 if order is None else order["chunks"],
            self._skip,
        )

    def __repr__(self) -> str:
        return f"<Live {self.key!r} chunks: {self.count} sent: {self._sent}>"

    @property
    def paused(self) -> bool:
        """Whether the reader has enough for now."""
        return bool(self._waits_for_reader and self._unsent)

    @property
    def is_over(self) -> bool:
        """Whether all is sent that there ever will be."""
        return self.ended and not self._unsent

    def take(self, emission: Emission) -> None:
        """Take in what came of a turn."""
        for chunk in emission.chunks:
            if self.is_read and self.count >= self._skip:
                try:
                    size = sizeof(chunk)
                except Exception as error:
                    self.fail(error)
                    return
                self._unsent.append((chunk, size))
            if self._keeps:
                self._kept.append(chunk)
            self.count += 1
        self.ended, self.error = emission.ended, emission.error

    def fail(self, error: BaseException) -> None:
        """There is nothing more to come, for a reason; what came is read before it."""
        self.ended, self.error = True, error

    def taken(self, count: int) -> None:
        """The reader has taken so many chunks; see :class:`protocol.ReadMessage`."""
        if count >= 0:
            self._window.taken(count)
            return
        self._waits_for_reader = False
        self._window.open()
        if count == -2:
            self.is_read = False
            self._unsent.clear()

    def part(self) -> Part | None:
        """What may be sent now. It fails with a chunk that cannot be pickled."""
        chunks, sizes = [], []
        while self._unsent and self._window.admits(self._unsent[0][1]):
            chunk, size = self._unsent.popleft()
            self._window.send(size)
            chunks.append(chunk)
            sizes.append(size)
        pack = self._packed(chunks)
        more = bool(self._unsent)
        if not chunks and (self._is_told or not more):
            return None
        # Who has read all that came needs to know that it is waited for.
        self._is_told = more
        nbytes = sum(sizes[: len(chunks)])
        part = Part(self.key, self._sent, len(chunks), nbytes, more, pack)
        self._sent += len(chunks)
        return part

    def _packed(self, chunks: list[Any]) -> Pack:
        """Pack chunks; of those that cannot be, take out the first and what follows."""
        try:
            return pack_all(chunks) if chunks else _NOTHING
        except Exception as error:
            self.fail(error)
        self._unsent.clear()
        del chunks[_packable(chunks) :]
        return pack_all(chunks) if chunks else _NOTHING

    @property
    def combine(self) -> Callable[[list[Any]], Any] | None:
        """What makes the result of all chunks; None: the list is the result.

        Raises
        ------
        Exception
            It cannot be unpickled here.
        """
        pickled = None if self._order is None else self._order["combine"]
        return None if pickled is None else pickle.loads(pickled)

    def whole(self) -> Any:
        """All chunks, or what the user's function makes of them.

        Raises
        ------
        Exception
            What that raises.
        """
        if not self._keeps:
            return None
        combine = self.combine
        return self._kept if combine is None else combine(self._kept)

    @property
    def is_combined(self) -> bool:
        """Whether code of the user's makes the result."""
        return self._order is not None and self._order["combine"] is not None


def _packable(chunks: list[Any]) -> int:
    """How many can be packed of those before the first that cannot."""
    for count, chunk in enumerate(chunks):
        try:
            pack_all([chunk])
        except Exception:
            return count
    # Only together, for whatever reason.
    return 0
