"""Live values to bytes, compressed where that saves something, and back.

LZ4 rather than Zstd: a cache is there for the time of a hit. What networks answer,
floats that look like noise, hardly compresses with either (1.00 against 0.91), but
LZ4 unpacks it at the speed of memory, and everything else two to three times as fast.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import lz4.block  # type: ignore[import-untyped]

from daskinfer.cache import structure
from daskinfer.transport import dumps, loads

#: Less than this is not worth compressing.
_MIN_COMPRESSED = 512
#: Compressed to more than this share, it stays as it was: a hit is faster then.
_WORTHWHILE = 0.9
#: The format of LZ4's blocks takes no more.
_MAX_COMPRESSED = 0x7E000000


@dataclass(frozen=True, slots=True)
class Packed:
    """A value as bytes.

    Parameters
    ----------
    data
        The bytes, perhaps compressed.
    raw
        How many they are uncompressed; 0: they are not compressed.
    plain
        Whether they are data alone, see :mod:`daskinfer.cache.structure`; otherwise
        they are a pickle, which must not come from a file.
    marked
        Whether tensors in the value belong on the device.
    """

    data: structure.Buffer
    raw: int
    plain: bool
    marked: bool = False


def pack(value: Any, marked: bool = False) -> Packed:
    """Turn a value into bytes.

    Raises
    ------
    Exception
        What pickling raises, where the value is not plain data.

    Examples
    --------
    >>> packed = pack({"scores": [0.5, 0.25]})
    >>> packed.plain
    True
    >>> unpack(packed)
    {'scores': [0.5, 0.25]}
    """
    try:
        data, plain = structure.encode(value), True
    except structure.NoStructureError:
        frames = [pickle.PickleBuffer(frame) for frame in dumps(value)]
        data, plain = pickle.dumps(frames, protocol=5), False
    raw = 0
    if _MIN_COMPRESSED <= len(data) <= _MAX_COMPRESSED:
        compressed = lz4.block.compress(data, store_size=False)
        if len(compressed) <= _WORTHWHILE * len(data):
            data, raw = compressed, len(data)
    return Packed(data, raw, plain, marked)


def unpack(packed: Packed) -> Any:
    """Turn bytes into a value of its own.

    Raises
    ------
    Exception
        The bytes are no packed value, or a class that it needs is not there.
    """
    data = packed.data
    if packed.raw:
        data = lz4.block.decompress(data, uncompressed_size=packed.raw)
    if packed.plain:
        return structure.decode(data)
    return loads(pickle.loads(data))
