"""Many small results in few frames."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from daskinfer.transport.frames import Frame, dumps, loads
from daskinfer.transport.tensors import elements, from_elements, is_plain

#: Larger arrays gain nothing from sharing a buffer; they would only be copied.
_MAX_PACKED_BYTES = 64 * 1024


def pack(values: Sequence[Any]) -> tuple[bytes, list[Frame]]:
    """Turn many values into few frames.

    Parameters
    ----------
    values
        Results to be fetched together. Arrays and tensors of equal kind, dtype and
        shape share one buffer; everything else goes through :func:`dumps`.

    Returns
    -------
    header : bytes
        What :func:`unpack` needs to know. It can travel in any message.
    frames : list of bytes or memoryview
        The buffers, which own their memory or are views of a value too large to
        be worth copying.

    Raises
    ------
    Exception
        As :func:`dumps`.

    Examples
    --------
    >>> header, frames = pack([np.zeros(2), "text", np.ones(2)])
    >>> unpack(header, frames)
    [array([0., 0.]), 'text', array([1., 1.])]
    """
    groups: dict[Any, tuple[list[int], list[np.ndarray]]] = {}
    others: list[int] = []
    for place, value in enumerate(values):
        packable = _packable(value)
        if packable is None:
            others.append(place)
            continue
        kind, array = packable
        places, arrays = groups.setdefault((kind, array.dtype, array.shape), ([], []))
        places.append(place)
        arrays.append(array)

    layout = []
    frames: list[Frame] = []
    for (kind, dtype, shape), (places, arrays) in groups.items():
        layout.append((kind, dtype.str, shape, places))
        frames.append(b"".join([array.tobytes() for array in arrays]))
    rest = dumps([values[place] for place in others]) if others else []
    return pickle.dumps((layout, others), protocol=5), [*frames, *rest]


def unpack(header: bytes, frames: Sequence[Frame]) -> list[Any]:
    """Turn the frames of :func:`pack` back into the values.

    Parameters
    ----------
    header, frames
        What :func:`pack` returned, as it arrived.

    Returns
    -------
    list
        The values in their order. Each owns its memory, so that keeping one does
        not keep all, and can be written to.
    """
    layout, others = pickle.loads(header)
    values: list[Any] = [None] * (sum(len(entry[3]) for entry in layout) + len(others))
    for (kind, dtype, shape, places), frame in zip(layout, frames, strict=False):
        together = np.ndarray((len(places), *shape), dtype, buffer=frame)
        for place, array in zip(places, together, strict=True):
            copy = np.array(array, dtype)
            values[place] = copy if kind is None else from_elements(copy, *kind)
    if others:
        rest = loads(frames[len(layout) :])
        for place, value in zip(others, rest, strict=True):
            values[place] = value
    return values


def merge(packs: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    """Turn the packs of several workers into one dict.

    Parameters
    ----------
    packs
        Each with ``keys``, and the ``header`` and ``frames`` of :func:`pack`.

    Examples
    --------
    >>> header, frames = pack([1, 2])
    >>> merge([{"keys": ["a", "b"], "header": header, "frames": frames}])
    {'a': 1, 'b': 2}
    """
    values: dict[Any, Any] = {}
    for part in packs:
        unpacked = unpack(part["header"], part["frames"])
        values.update(zip(part["keys"], unpacked, strict=True))
    return values


def _packable(value: Any) -> tuple[tuple[str | None, bool] | None, np.ndarray] | None:
    """Return kind and elements of a small plain array or tensor, else None."""
    if type(value) is np.ndarray:
        plain = value.dtype.kind in "?biufcmMSU" and value.dtype.itemsize
        return (None, value) if plain and value.nbytes < _MAX_PACKED_BYTES else None
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not getattr(torch, "Tensor", None):
        return None
    if value.nbytes >= _MAX_PACKED_BYTES or not is_plain(value):
        return None
    array, dtype, requires_grad = elements(value)
    return (dtype, requires_grad), array
