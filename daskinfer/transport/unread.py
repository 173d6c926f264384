"""Parts of messages that Dask hands on without reading them."""

from __future__ import annotations

from typing import Any

from distributed.protocol.compression import decompress
from distributed.protocol.serialize import (
    Serialize,
    Serialized,
    merge_and_deserialize,
)


def read(part: Any) -> Any:
    """Return what a part of a message holds, whether or not it has been sent yet.

    Parameters
    ----------
    part
        As a scheduler receives what `to_serialize` has wrapped, or as that was made;
        anything else is returned itself.

    Examples
    --------
    >>> from distributed.protocol import dumps, loads, to_serialize
    >>> passed = loads(dumps({"x": to_serialize(b"abc")}), deserialize=False)
    >>> read(passed["x"]), read(to_serialize(b"abc")), read(b"abc")
    (b'abc', b'abc', b'abc')
    """
    if isinstance(part, Serialized):
        header, frames = part.header, part.frames
        if "compression" in header:
            frames = decompress(header, frames)
        return merge_and_deserialize(header, frames)
    return part.data if isinstance(part, Serialize) else part
