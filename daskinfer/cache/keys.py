"""What an entry is found by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

_MIN_DIGEST, _MAX_DIGEST = 16, 64
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class CacheKey:
    """A strong digest, and all that it stands for.

    Entries are filed under the digest, on disk as its name. A look-up is a hit only if
    ``full`` is equal too, so that not even a crafted collision of digests gives
    the value of another key.

    Parameters
    ----------
    digest
        16 to 64 bytes of a cryptographic hash.
    full
        The complete description of the key. It is kept with the entry and counts
        towards its size; where inputs are large, let it hold their hash.

    Raises
    ------
    TypeError, ValueError
        If the fields are not bytes, or the digest is too short or too long.

    Examples
    --------
    >>> CacheKey.of("resnet50", "1") == CacheKey.of("resnet50", "1")
    True
    >>> CacheKey.of("ab", "c") == CacheKey.of("a", "bc")
    False
    """

    digest: bytes
    full: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("digest", "full"):
            value = getattr(self, name)
            if type(value) is not bytes:
                raise TypeError(f"{name} must be bytes, not {type(value).__name__}")
        if not _MIN_DIGEST <= len(self.digest) <= _MAX_DIGEST:
            raise ValueError(
                f"digest must have {_MIN_DIGEST} to {_MAX_DIGEST} bytes, "
                f"got {len(self.digest)}"
            )

    @classmethod
    def of(cls, *parts: str | bytes) -> CacheKey:
        """Make the key that stands for all parts, in their order.

        Parameters
        ----------
        parts
            Texts and bytes; ``"a"`` and ``b"a"`` are different parts.

        Raises
        ------
        TypeError
            For a part of another type.
        """
        full = b"".join(map(_tagged, parts))
        return cls(hashlib.blake2b(full, digest_size=_DIGEST_BYTES).digest(), full)

    @classmethod
    def coerce(cls, key: CacheKey | str | bytes) -> CacheKey:
        """Return a key as it is, and the key of one text or bytes."""
        return key if isinstance(key, cls) else cls.of(key)  # type: ignore[arg-type]


def _tagged(part: str | bytes) -> bytes:
    if isinstance(part, str):
        raw, tag = part.encode("utf-8", "surrogatepass"), b"s"
    elif isinstance(part, bytes):
        raw, tag = part, b"b"
    else:
        raise TypeError(
            "a cache key is a CacheKey, or made of str and bytes, not "
            f"{type(part).__name__}"
        )
    return tag + len(raw).to_bytes(8, "little") + raw
