"""Any Python object as a skeleton and the memory of its tensors and arrays.

The skeleton is a pickle in which each tensor storage, and each large array, is only
a number. So tensors that share memory, tied weights and views alike, share it
afterwards; and whatever pickle keeps, from extra state to hooks, is kept.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from daskinfer.artifact.weights import aligned, read_blob, write_blob

if TYPE_CHECKING:
    import torch

#: Smaller arrays stay in the skeleton.
_OUT_OF_BAND_BYTES = 64 * 1024


def take_apart(obj: Any) -> tuple[bytes, memoryview | None]:
    """Divide an object into skeleton and weights.

    Parameters
    ----------
    obj
        Anything that cloudpickle takes. It is only read; storages on a device are
        copied to the CPU one at a time.

    Returns
    -------
    skeleton : bytes
        The object without the memory of its tensors and large arrays.
    weights : memoryview or None
        That memory, in one safetensors blob; None if there is none.

    Raises
    ------
    Exception
        Whatever the object raises while it is pickled.

    Examples
    --------
    >>> import numpy as np
    >>> skeleton, weights = take_apart({"x": np.zeros(100_000)})
    >>> put_together(skeleton, weights)["x"].shape
    (100000,)
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    sizes, arrays = pickler.sizes, pickler.arrays
    skeleton = pickle.dumps((sizes, arrays, file.getvalue()), protocol=5)
    if not sizes:
        return skeleton, None
    return skeleton, write_blob(sizes, lambda i: _bytes_of(pickler.owners[i]))


def put_together(
    skeleton: bytes, weights: memoryview | None, *, own_memory: bool = True
) -> Any:
    """Make the object again.

    Parameters
    ----------
    skeleton, weights
        What :func:`take_apart` returned.
    own_memory
        Whether tensors and arrays get memory of their own. If not, they are views
        of ``weights``, where that can be written to.

    Returns
    -------
    Any
        The object, with all its tensors on the CPU.

    Raises
    ------
    Exception
        Whatever unpickling raises, such as ImportError for a missing module.
    """
    sizes, arrays, pickled = pickle.loads(skeleton)
    views: list[memoryview] = []
    if weights is not None:
        views = read_blob(weights if own_memory else aligned(weights), sizes)
    if own_memory:
        views = [aligned(view, copy=True) for view in views]
    return _Unpickler(io.BytesIO(pickled), views, arrays).load()


def try_pickle(obj: Any) -> None:
    """Raise what :func:`take_apart` would, without copying any weights."""
    _Pickler(io.BytesIO()).dump(obj)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles an object, and notes the memory that it leaves out.

    ``owners`` and ``sizes`` (bytes) describe that memory, in the blob's order;
    ``arrays`` says which of it belongs to arrays, which pickle counts by itself.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.owners: list[memoryview | torch.UntypedStorage] = []
        self.sizes: list[int] = []
        self.arrays: list[int] = []
        self._places: dict[int, int] = {}
        super().__init__(file, protocol=5, buffer_callback=self._in_band)

    def persistent_id(self, obj: Any) -> tuple[int, str | None] | None:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if isinstance(obj, torch.storage.TypedStorage):
            return self._place(obj._untyped_storage), str(obj.dtype)[6:]
        if isinstance(obj, torch.UntypedStorage):
            return self._place(obj), None
        return None

    def _place(self, storage: torch.UntypedStorage) -> int:
        # Several Python objects can stand for one storage.
        key = storage._cdata
        if key not in self._places:
            self._places[key] = self._append(storage, storage.nbytes())
        return self._places[key]

    def _in_band(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND_BYTES:
            return True
        self.arrays.append(self._append(raw, raw.nbytes))
        return False

    def _append(self, owner: memoryview | torch.UntypedStorage, nbytes: int) -> int:
        self.owners.append(owner)
        self.sizes.append(nbytes)
        return len(self.owners) - 1


def _bytes_of(owner: memoryview | torch.UntypedStorage) -> memoryview:
    if isinstance(owner, memoryview):
        return owner
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(owner.cpu()).numpy().data


class _Unpickler(pickle.Unpickler):
    """Unpickles an object around the memory that was left out."""

    def __init__(
        self, file: io.BytesIO, views: Sequence[memoryview], arrays: Sequence[int]
    ) -> None:
        super().__init__(file, buffers=[views[place] for place in arrays])
        self._views = views
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, pid: tuple[int, str | None]) -> Any:
        import torch

        place, dtype = pid
        if place not in self._storages:
            self._storages[place] = _storage(self._views[place])
        storage = self._storages[place]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(
            wrap_storage=storage, dtype=getattr(torch, dtype), _internal=True
        )


def _storage(view: memoryview) -> torch.UntypedStorage:
    import torch

    if not view.nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
