"""Many buffers in one blob, in the safetensors format.

One copy when the blob is written, none when it is read: the safetensors library
makes two and one, which counts for a model of many gigabytes. What is written here
is read by that library, and the reverse is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from daskinfer.wording import counted

#: Each buffer starts at a multiple of this many bytes, as vector instructions and
#: :func:`torch.frombuffer` like it. The format allows no gaps, so that buffers are
#: filled up with zeros instead; readers know the sizes they want.
ALIGNMENT = 64

_LENGTH_BYTES = 8


def write_blob(
    sizes: Sequence[int], buffers: Callable[[int], memoryview]
) -> memoryview:
    """Copy buffers into one blob.

    Parameters
    ----------
    sizes
        Bytes of each buffer.
    buffers
        Called once for each index, in order, just before it is copied, so that
        buffers which must first come from a device need not be there all at once.

    Returns
    -------
    memoryview
        The blob: bytes that can be written to, aligned.

    Examples
    --------
    >>> parts = [b"first", b"second"]
    >>> blob = write_blob([5, 6], lambda i: memoryview(parts[i]))
    >>> [bytes(view) for view in read_blob(blob, [5, 6])]
    [b'first', b'second']
    """
    entries = {}
    end = 0
    for name, size in enumerate(sizes):
        start, end = end, end + _padded(size)
        entries[str(name)] = {
            "dtype": "U8",
            "shape": [end - start],
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(_padded(len(text) + _LENGTH_BYTES) - _LENGTH_BYTES)

    base = _LENGTH_BYTES + len(text)
    blob = aligned_zeros(base + end).data
    blob[:_LENGTH_BYTES] = len(text).to_bytes(_LENGTH_BYTES, "little")
    blob[_LENGTH_BYTES:base] = text
    position = base
    for index, size in enumerate(sizes):
        blob[position : position + size] = buffers(index)
        position += _padded(size)
    return blob


def read_blob(blob: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Return views of the buffers that :func:`write_blob` put into a blob.

    Parameters
    ----------
    blob
        The whole blob.
    sizes
        Bytes of each buffer.

    Raises
    ------
    ValueError
        If the blob is shorter than its buffers.
    """
    base = _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "little")
    if base + sum(map(_padded, sizes)) != blob.nbytes:
        raise ValueError(
            f"a blob of {counted(blob.nbytes, 'byte')} does not hold "
            f"{counted(len(sizes), 'buffer')} of {counted(sum(sizes), 'byte')}"
        )
    views = []
    for size in sizes:
        views.append(blob[base : base + size])
        base += _padded(size)
    return views


def aligned(memory: memoryview, *, copy: bool = False) -> memoryview:
    """Return memory that can be written to and is aligned; a copy only if need be.

    Parameters
    ----------
    memory
        Bytes.
    copy
        Whether to copy in any case.
    """
    array = np.asarray(memory, np.uint8)
    if array.flags.writeable and not array.ctypes.data % ALIGNMENT and not copy:
        return memory
    fresh = aligned_zeros(memory.nbytes)
    fresh[:] = array
    return fresh.data


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned_zeros(size: int) -> np.ndarray:
    """So many bytes that can be written to, aligned."""
    room = np.zeros(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size]
