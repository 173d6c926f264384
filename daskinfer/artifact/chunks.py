"""Weights in chunks, each of which can be verified by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Bytes of a chunk, unless there would be more than so many of them: then twice as
#: many bytes, and so on. Both count in digests, and so are no setting.
CHUNK_BYTES = 4 * 2**20
MAX_CHUNKS = 2048

_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Chunks:
    """How some bytes are divided, and the SHA-256 of each part.

    Parameters
    ----------
    size
        Bytes altogether.
    chunk_size
        Bytes of each chunk but the last.
    hashes
        Of the chunks, in order.

    Attributes
    ----------
    key
        SHA-256 of all that, in hexadecimal: equal keys mean equal bytes.

    Raises
    ------
    ValueError
        If there are not as many hashes as chunks.

    Examples
    --------
    >>> chunks = Chunks.of(memoryview(b"abcdefg"), chunk_size=3)
    >>> len(chunks), chunks.span(2)
    (3, (6, 7))
    >>> chunks.is_whole(2, b"g"), chunks.is_whole(2, b"h")
    (True, False)
    >>> chunks.is_all_whole(memoryview(b"abcdefg"))
    True
    """

    size: int
    chunk_size: int
    hashes: tuple[bytes, ...] = field(repr=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        lengths = {len(found) for found in self.hashes}
        if (
            self.chunk_size < 1
            or len(self.hashes) != -(-self.size // self.chunk_size)
            or not lengths <= {_HASH_BYTES}
        ):
            raise ValueError(
                f"{len(self.hashes)} hashes do not describe {self.size} bytes in "
                f"chunks of {self.chunk_size}"
            )
        sizes = b"".join(n.to_bytes(8, "little") for n in (self.size, self.chunk_size))
        key = combined_hash([sizes, b"".join(self.hashes)])
        object.__setattr__(self, "key", key)

    @classmethod
    def of(cls, memory: memoryview, chunk_size: int | None = None) -> Chunks:
        """Divide some bytes."""
        size = memory.nbytes
        if chunk_size is None:
            chunk_size = CHUNK_BYTES
            while size > MAX_CHUNKS * chunk_size:
                chunk_size *= 2
        starts = range(0, size, chunk_size)
        hashes = [_hash(memory[start : start + chunk_size]) for start in starts]
        return cls(size, chunk_size, tuple(hashes))

    def __len__(self) -> int:
        return len(self.hashes)

    def span(self, index: int) -> tuple[int, int]:
        """Where a chunk begins and ends."""
        start = index * self.chunk_size
        return start, min(start + self.chunk_size, self.size)

    def is_whole(self, index: int, data: bytes | memoryview) -> bool:
        """Whether some bytes are those of a chunk."""
        return _hash(data) == self.hashes[index]

    def is_all_whole(self, memory: memoryview) -> bool:
        """Whether all bytes are those that were divided."""
        return memory.nbytes == self.size and all(
            self.is_whole(index, memory[slice(*self.span(index))])
            for index in range(len(self))
        )

    def to_message(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "size": self.size,
            "chunk_size": self.chunk_size,
            "hashes": b"".join(self.hashes),
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Chunks:
        """Read what :meth:`to_message` made.

        Raises
        ------
        ValueError
            If it makes no sense.
        """
        joined = bytes(message["hashes"])
        starts = range(0, len(joined), _HASH_BYTES)
        hashes = tuple(joined[start : start + _HASH_BYTES] for start in starts)
        return cls(message["size"], message["chunk_size"], hashes)


def combined_hash(parts: Iterable[bytes]) -> str:
    """SHA-256 of several parts and where each ends, in hexadecimal.

    >>> combined_hash([b"ab", b"c"]) == combined_hash([b"a", b"bc"])
    False
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()
