"""Objects to frames and back, exactly and fast.

``frames``
    :func:`dumps` and :func:`loads` carry requests and results in daskinfer's own
    messages
``packing``
    :func:`pack`, :func:`unpack` and :func:`merge` carry many small results at once
``registration``
    :func:`register` teaches Dask's serializer the tensors it lacks, so that
    ``client.gather`` and ``client.scatter`` keep them too
``tensors``
    a tensor as the bits of its elements
``unread``
    :func:`read` looks into what Dask hands on unread

All is pickle, protocol 5, with three additions: a plain tensor travels as the bits
of its elements; whatever lives in ``__main__`` is carried by value (cloudpickle);
and what arrives can be written to and lies on the CPU. Nothing here imports torch
in a process that has no tensors.
"""

from __future__ import annotations

from daskinfer.transport.frames import OUT_OF_BAND_BYTES, Frame, dumps, loads
from daskinfer.transport.packing import merge, pack, unpack
from daskinfer.transport.registration import register
from daskinfer.transport.unread import read

__all__ = [
    "OUT_OF_BAND_BYTES",
    "Frame",
    "dumps",
    "loads",
    "merge",
    "pack",
    "read",
    "register",
    "unpack",
]
