"""Words for messages."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number with the noun that it counts.

    Parameters
    ----------
    count
        How many.
    noun, plural
        What; several have an ``s`` more where no plural is given.

    Examples
    --------
    >>> counted(1, "request"), counted(0, "request"), counted(1200, "request")
    ('1 request', '0 requests', '1,200 requests')
    >>> counted(2, "batch", "batches")
    '2 batches'
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
