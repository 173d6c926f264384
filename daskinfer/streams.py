"""Dask's message streams, tuned for many small requests."""

from __future__ import annotations

from typing import Any


def tune(stream: Any, interval: float) -> None:
    """Shorten the interval in which the messages of a stream are collected.

    Parameters
    ----------
    stream
        A :class:`distributed.batched.BatchedSend`, or None, for which nothing is done.
    interval
        Seconds.
    """
    if stream is None:
        return
    stream.interval = interval
    # Dask keeps the last thousand messages for debugging, here with all the inputs,
    # outputs and exceptions they carry.
    stream.recent_message_log.clear()
    stream.recent_message_log = type(stream.recent_message_log)(maxlen=0)
