"""Objects to frames and back."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from daskinfer.transport.tensors import elements, from_elements, is_plain

Frame: TypeAlias = "bytes | bytearray | memoryview"

#: Buffers of at least this many bytes get a frame of their own, uncopied.
OUT_OF_BAND_BYTES = 64 * 1024


def dumps(obj: Any) -> list[Frame]:
    """Turn an object into frames.

    Parameters
    ----------
    obj
        Anything that pickle or cloudpickle takes.

    Returns
    -------
    list of bytes or memoryview
        The pickle, then one frame for each buffer of 64 KiB or more. Those frames
        are views of the object's own memory: do not change it until they are sent.

    Raises
    ------
    Exception
        Whatever the object raises while it is pickled, by cloudpickle last.

    Notes
    -----
    Tensors on a device are copied to the CPU; their gradients are not carried.
    Thread-safe.

    Examples
    --------
    >>> frames = dumps({"x": np.ones(3), "n": 1})
    >>> len(frames)
    1
    >>> loads(frames)
    {'x': array([1., 1., 1.]), 'n': 1}
    """
    buffers: list[Frame] = []
    try:
        head = _pickle(_Pickler, obj, buffers)
        by_value = b"__main__" in head or bool(
            cloudpickle.list_registry_pickle_by_value()
        )
    except Exception:
        # Lambdas and local classes; what cloudpickle cannot take either is the
        # caller's to see, from there.
        by_value = True
    if by_value:
        buffers = []
        head = _pickle(_ByValuePickler, obj, buffers)
    return [head, *buffers]


def loads(frames: Sequence[Frame]) -> Any:
    """Turn frames back into the object.

    Parameters
    ----------
    frames
        What :func:`dumps` returned, as it arrived.

    Returns
    -------
    Any
        The object. Its arrays and tensors can be written to: frames that are
        writable are used in place, read-only ones are copied.

    Raises
    ------
    Exception
        Whatever unpickling raises, such as ImportError for a missing module.
    """
    head, *buffers = frames
    return pickle.loads(head, buffers=[_writable(buffer) for buffer in buffers])


def _writable(buffer: Frame) -> Frame:
    # A frame cut out of a larger message can lie at any address; arrays want theirs
    # aligned.
    where = np.frombuffer(buffer, np.uint8).__array_interface__["data"]
    address, readonly = where
    return bytearray(buffer) if readonly or address % 8 else buffer


def _pickle(pickler: Any, obj: Any, buffers: list[Frame]) -> bytes:
    def in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    pickler(file, protocol=5, buffer_callback=in_band).dump(obj)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickle, with tensors as bytes and arrays that stay writable."""

    def reducer_override(self, obj: Any) -> Any:
        return _reduce(obj)


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """The same, with what lives in ``__main__`` or nowhere carried by value."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce(obj)
        if reduced is NotImplemented:
            return super().reducer_override(obj)
        return reduced


def _reduce(obj: Any) -> Any:
    cls = type(obj)
    if cls is np.ndarray:
        return _reduce_array(obj)
    torch = sys.modules.get("torch")
    if torch is None or cls is not getattr(torch, "Tensor", None):
        return NotImplemented
    if not (obj.is_cpu or obj.is_meta):
        obj = obj.cpu()
    if not is_plain(obj):
        return NotImplemented
    return from_elements, elements(obj)


def _reduce_array(array: np.ndarray) -> Any:
    flags = array.flags
    if flags.c_contiguous and array.dtype.kind in "?biufc":
        # NumPy would pickle the dtype object, at twice the price.
        source: Any = array if flags.writeable else array.copy()
        return _array, (array.shape, array.dtype.str, pickle.PickleBuffer(source))
    if flags.writeable or array.dtype.hasobject:
        return NotImplemented
    return array.copy().__reduce_ex__(5)


def _array(shape: tuple[int, ...], dtype: str, data: Frame) -> np.ndarray:
    return np.ndarray(shape, dtype, data)
