"""One entry as the content of a file, with a checksum over all of it."""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from daskinfer.cache.packing import Packed
from daskinfer.cache.structure import Buffer

#: Part of every file's name: files of another version are left alone.
VERSION = 1

_MAGIC = b"daskinf\x01"
_CHECKSUM_BYTES = 16
#: When it was made, size uncompressed, whether tensors are marked, length of the key.
_HEADER = struct.Struct("<dQ?xxxI")
_START = len(_MAGIC) + _CHECKSUM_BYTES


class CorruptError(ValueError):
    """A file is not what was written."""


class Record(NamedTuple):
    """What a file holds.

    Parameters
    ----------
    created
        When the entry was put, in seconds since 1970.
    full
        Its full key.
    packed
        Its value, plain data.
    """

    created: float
    full: bytes
    packed: Packed


def seal(record: Record) -> list[Buffer]:
    """Return the parts of a file, in order.

    Examples
    --------
    >>> parts = seal(Record(1.5, b"key", Packed(b"value", 0, plain=True)))
    >>> bytes(unseal(b"".join(parts)).packed.data)
    b'value'
    >>> unseal(b"".join(parts)[:-1])
    Traceback (most recent call last):
        ...
    daskinfer.cache.records.CorruptError: the checksum is wrong
    """
    created, full, packed = record
    head = _HEADER.pack(created, packed.raw, packed.marked, len(full))
    checksum = xxhash.xxh3_128(head)
    checksum.update(full)
    checksum.update(packed.data)
    return [_MAGIC, checksum.digest(), head, full, packed.data]


def unseal(data: bytes) -> Record:
    """Read the content of a file.

    Raises
    ------
    CorruptError
        It is torn, or a bit of it has changed.
    """
    view = memoryview(data)
    if view[: len(_MAGIC)] != _MAGIC or len(view) < _START + _HEADER.size:
        raise CorruptError("it does not begin as such a file does")
    if xxhash.xxh3_128_digest(view[_START:]) != view[len(_MAGIC) : _START]:
        raise CorruptError("the checksum is wrong")
    created, raw, marked, length = _HEADER.unpack_from(view, _START)
    start = _START + _HEADER.size
    full = bytes(view[start : start + length])
    # Not copied: what is brought up into memory is built anew from it, or as large.
    body = view[start + length :]
    return Record(created, full, Packed(body, raw, True, marked))
