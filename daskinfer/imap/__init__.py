"""Inputs without end: read lazily, answered in a stream, with bounded memory.

``calls``
    :class:`Iterated`: ``imap`` and ``aimap``, for handles
``results``
    the iterators that they give
``flow``
    sends inputs while there is room, and holds results until they are taken
``requests``
    those on their way: how each ends
``following``
    what the deployment can take
``window``
    which results are due, and how many more may be sent
``pace``
    how many at a time, and how to give way to others
``sources``
    reading what a user passed, in a thread of its own
``signals``
    waking who waits, thread or coroutine
``files``
    :func:`run_files`: from files to results
"""

from __future__ import annotations
