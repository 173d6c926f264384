"""Which requests may share a forward pass, and how many rows each brings."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

from daskinfer.payload.tree import Node, holds_arrays, is_array, is_tensor, open_node
from daskinfer.transport import Frame, dumps

#: Longer signatures are replaced by a digest: they travel with every request.
_MAX_SIGNATURE_CHARS = 120

#: Their ``repr`` tells value and type apart: ``1``, ``1.0``, ``True``, ``'1'``.
_REPR_TYPES = frozenset({str, int, float, bool, bytes, complex, type(None)})

#: ``dtype.str`` names these completely; others (structured, ...) need their repr.
_PLAIN_KINDS = frozenset("?bBiufcmMSUO")


class Measure(NamedTuple):
    """What batching needs to know about a request.

    Parameters
    ----------
    signature
        Requests of equal signature may share a forward pass: same structure, and
        for each array the same kind, dtype and shape apart from the batch axis,
        and equal constants. None: the request runs alone.
    rows
        Its size along the batch axis; 1 where the request runs alone.
    """

    signature: str | None
    rows: int


class _RunsAloneError(Exception):
    """The request cannot be batched with any other."""


def measure(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int | None = 0
) -> Measure:
    """Size up one request.

    Parameters
    ----------
    args, kwargs
        What the model would be called with. Not changed.
    batch_dim
        The axis along which requests are joined. None: a request is one sample,
        and samples are stacked on a new axis 0.

    Returns
    -------
    Measure
        The signature is the same in every process for equal inputs.

    Raises
    ------
    TypeError
        For a dask collection, which would be built where the model runs, and not be
        computed.
    Exception
        Whatever the input's own code raises, for instance while it is pickled to
        compare a constant by value. It concerns this request alone.

    Notes
    -----
    What carries rows: arrays anywhere, and lists without arrays among the
    positional arguments (texts, records), one row per element. With
    ``batch_dim=None`` any positional leaf but None is a sample. Everything else is
    a constant, and part of the signature by its value.

    A request runs alone if its leaves disagree about the number of rows, if none
    carries rows, or if an array is of a kind that cannot be concatenated without
    loss (sparse, nested or quantised tensors, masked arrays, tensor subclasses).

    Thread-safe.

    Examples
    --------
    >>> measure((np.ones((2, 3), "float32"),), {})
    Measure(signature='n<f4(3,)', rows=2)
    >>> measure((["a text", "another"],), {"top_k": 5})
    Measure(signature='tuple([0]:list)|top_k=5', rows=2)
    >>> measure(({"text": "a sample"},), {}, batch_dim=None)
    Measure(signature="tuple([0]:dict(['text']:any))", rows=1)
    >>> measure((np.ones((2, 3)), np.ones((4, 3))), {})
    Measure(signature=None, rows=1)
    """
    survey = _Survey(batch_dim)
    try:
        if len(args) == 1 and not kwargs and is_array(args[0]):
            signature = survey.array(args[0])
        else:
            signature = survey.node(Node(args, list(range(len(args))), list(args)))
            for name in sorted(kwargs):
                signature += f"|{name}={survey.visit(kwargs[name], keyword=True)}"
    except _RunsAloneError:
        return Measure(None, 1)
    if survey.rows is None:
        return Measure(None, 1)
    if len(signature) > _MAX_SIGNATURE_CHARS:
        signature = _digest(signature.encode("utf-8", "surrogatepass"))
    return Measure(signature, survey.rows)


class _Survey:
    """Walks one request, counts its rows and writes down its structure."""

    __slots__ = ("batch_dim", "rows")

    def __init__(self, batch_dim: int | None) -> None:
        self.batch_dim = batch_dim
        self.rows: int | None = None

    def visit(self, obj: Any, keyword: bool = False) -> str:
        _refuse_lazy(obj)
        if is_array(obj):
            return self.array(obj)
        if isinstance(obj, list) and not keyword and not holds_arrays(obj):
            self.count(1 if self.batch_dim is None else len(obj))
            return "list"
        if keyword and not isinstance(obj, (dict, list, tuple)):
            # What a constant object holds beside its fields counts too.
            if not holds_arrays(obj):
                return _constant(obj)
        node = open_node(obj)
        if node is not None:
            return self.node(node, keyword)
        if self.batch_dim is None and not keyword and obj is not None:
            self.count(1)
            return "any"
        return _constant(obj)

    def node(self, node: Node, keyword: bool = False) -> str:
        children = ",".join(
            f"{label}:{self.visit(child, keyword)}" for label, child in node
        )
        return f"{_class_name(type(node.template))}({children})"

    def array(self, array: Any) -> str:
        """Count the rows of an array and describe the rest of it."""
        if type(array) is np.ndarray or type(array) is np.memmap:
            dtype = array.dtype
            name = dtype.str if dtype.kind in _PLAIN_KINDS else repr(dtype)
            kind = f"n{name}"
        elif is_tensor(array):
            _refuse_exotic(array)
            kind = f"t{str(array.dtype)[6:]}"
        else:
            raise _RunsAloneError
        shape = tuple(array.shape)
        axis = self.batch_dim
        if axis is None:
            self.count(1)
            return f"{kind}{shape}"
        if not shape:
            return f"{kind}={_constant(array.tolist())}"
        if axis >= len(shape):
            raise _RunsAloneError
        self.count(shape[axis])
        return f"{kind}{shape[:axis] + shape[axis + 1 :]}"

    def count(self, rows: int) -> None:
        if self.rows is None:
            self.rows = rows
        elif self.rows != rows:
            raise _RunsAloneError


def _refuse_exotic(tensor: Any) -> None:
    import torch

    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if (
        not plain
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
    ):
        raise _RunsAloneError


def _refuse_lazy(obj: Any) -> None:
    cls = type(obj)
    # xarray's objects have a graph only now and then.
    if not (hasattr(cls, "__dask_graph__") and cls.__module__.startswith("dask")):
        return
    if hasattr(cls, "map_blocks"):
        instead = "model.predict(x) or x.map_blocks(model, dtype=...)"
    elif hasattr(cls, "map_partitions"):
        instead = "x.map_partitions(model)"
    else:
        instead = "dask.delayed(model)(x)"
    raise TypeError(
        f"a model takes values, not a lazy dask {cls.__name__}: for one, x, use "
        f"{instead}, or pass the future client.compute(x)"
    )


def _class_name(cls: type) -> str:
    if cls.__module__ == "builtins":
        return cls.__name__
    return f"{cls.__module__}.{cls.__qualname__}"


def _constant(obj: Any) -> str:
    """Write a constant down by kind and value."""
    if type(obj) in _REPR_TYPES:
        return repr(obj)
    return _digest(*dumps(obj))


def _digest(*parts: Frame) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return f"#{digest.hexdigest()}"
