"""Arrays and tensors of every kind."""

from __future__ import annotations

import numpy as np
import torch

from daskinfer.transport import OUT_OF_BAND_BYTES

#: Elements of an array that is sent out of band, whatever its dtype.
LARGE = OUT_OF_BAND_BYTES + 1

ARRAYS = {
    "plain": np.arange(6, dtype="float32").reshape(2, 3),
    "empty": np.zeros((0, 3), "int16"),
    "zero-dim": np.array(3.5),
    "bool": np.array([True, False]),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(20)[::3],
    "negative": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "big-endian": np.arange(3, dtype=">f8"),
    "longdouble": np.arange(3, dtype="longdouble"),
    "complex": np.array([1 + 2j], "complex64"),
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "records": np.zeros(2, [("a", "f4"), ("b", "U3")]),
    "objects": np.array([None, "x", {1}], dtype=object),
    "large": np.arange(LARGE, dtype="float32"),
    "large objects": np.array([1, "x"] * LARGE, dtype=object),
}


PLAIN_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.complex64,
]


class Image(torch.Tensor):
    """A subclass, which torch's own pickling takes care of."""


def exotic_tensors() -> dict[str, torch.Tensor]:
    tagged = torch.ones(2)
    tagged.label = "cat"  # type: ignore[attr-defined]
    return {
        "sparse": torch.eye(3).to_sparse(),
        "subclass": torch.ones(2).as_subclass(Image),
        "tagged": tagged,
        "meta": torch.ones(2, device="meta"),
    }
