"""Handlers whose errors end nothing but the message at hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from daskinfer.logs import Log

logger = Log("handlers")


def guarded(handler: Callable[..., None]) -> Callable[..., None]:
    """Keep an error in a stream handler from closing the whole stream.

    Dask drops the connection, and with it the worker or client, when a handler
    raises.
    """

    @wraps(handler)
    def handle(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            handler(self, *args, **kwargs)
        except Exception:
            logger.exception(
                "%s failed; the message is lost",
                handler.__name__,
                deployment=kwargs.get("name"),
                version=kwargs.get("version"),
                stimulus_id=kwargs.get("stimulus_id"),
            )

    return handle
