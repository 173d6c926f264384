"""What tells models, and versions of a deployment, apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from daskinfer.artifact.chunks import Chunks, combined_hash


def content_digest(format: str, builder: bytes, chunks: Chunks | None) -> str:
    """SHA-256 of a model's parts, the weights by the hashes of their chunks.

    So weights need to be hashed once only: whoever has verified all chunks has
    verified the whole.
    """
    key = b"" if chunks is None else chunks.key.encode()
    return combined_hash([format.encode(), builder, key])


def version_digest(digest: str, policy: Mapping[str, Any]) -> str:
    """SHA-256 of a model's own digest and how its requests are batched.

    Parameters
    ----------
    digest
        That of the model's content.
    policy
        The fields of its :class:`~daskinfer.BatchPolicy`.

    Examples
    --------
    >>> one = version_digest("abc", {"max_batch_size": 8, "batch_dim": 0})
    >>> one == version_digest("abc", {"batch_dim": 0, "max_batch_size": 8})
    True
    >>> one == version_digest("abc", {"batch_dim": 0, "max_batch_size": 16})
    False
    """
    text = json.dumps(policy, sort_keys=True, separators=(",", ":"))
    return combined_hash([digest.encode(), text.encode()])
