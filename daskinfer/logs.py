"""Log lines that say what they are about, and do not drown the others.

Every line of the engine goes through a :class:`Log`. It ends with the deployment, the
version and the stimulus id, as far as there are any, by which it is found again in
Dask's own logs and in :meth:`daskinfer.Model.story`.

What inputs and results hold never gets into a line: of an exception that somebody
else's code has raised, :func:`daskinfer.failure.origin` tells the type and the place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.metrics import monotonic

from daskinfer.names import shown

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    # Not generic in Python 3.10.
    _Adapter = logging.LoggerAdapter

__all__ = ["Flood", "Log"]

#: Lines of one kind that are written within a window of so many seconds.
BURST, WINDOW = 10, 10.0
#: Kinds of lines that are remembered at most.
_KINDS = 1000

_FIELDS = ("deployment", "version", "stimulus_id")


class Flood:
    """Decides which of many lines of one kind are written. Pure.

    Parameters
    ----------
    burst, window
        How many are, within how many seconds from the first of them.

    Examples
    --------
    >>> flood = Flood(burst=2, window=10.0)
    >>> [flood.admits("late", now) for now in (0.0, 1.0, 2.0, 3.0)]
    [True, True, False, False]
    >>> list(flood.over(9.0)), list(flood.over(10.0)), flood.admits("late", 10.0)
    ([], [('late', 2)], True)
    """

    def __init__(self, burst: int = BURST, window: float = WINDOW) -> None:
        self.burst = burst
        self.window = window
        # In the order in which their windows end.
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def __repr__(self) -> str:
        return f"<Flood kinds: {len(self._kinds)}>"

    def admits(self, kind: Hashable, now: float) -> bool:
        """Whether one more line is written; it is counted in any case."""
        began, count = self._kinds.get(kind, (now, 0))
        self._kinds[kind] = began, count + 1
        return count < self.burst

    def is_last(self, kind: Hashable) -> bool:
        """Whether those that follow in this window are not."""
        return self._kinds[kind][1] == self.burst

    def over(self, now: float) -> Iterator[tuple[Hashable, int]]:
        """Kinds whose window has ended, and how many of each were left out."""
        while self._kinds:
            kind, (began, count) = next(iter(self._kinds.items()))
            if now < began + self.window and len(self._kinds) <= _KINDS:
                return
            del self._kinds[kind]
            if count > self.burst:
                yield kind, count - self.burst

    def clear(self) -> None:
        """Begin anew."""
        self._kinds.clear()


class _Kind(NamedTuple):
    level: int
    message: str
    deployment: str | None


#: One for the process: whichever line comes next tells how many were left out.
_flood = Flood()
_lock = threading.Lock()


class Log(_Adapter):
    r"""Writes to ``distributed.inference.<module>``, where Dask's logging finds it.

    Its methods are those of a :class:`logging.Logger`. They take besides

    ``deployment``, ``version``, ``stimulus_id``
        what the line is about; it ends with them, and its record has them as attributes
        for whoever formats records in another way
    ``limited``
        False for what must not be missed, such as that a worker is lost. Of all else
        no more than 10 lines in 10 seconds are written that have one wording and one
        deployment; the next line says how many were left out.

    Parameters
    ----------
    module
        Who writes.

    Notes
    -----
    Thread-safe.

    Examples
    --------
    >>> log = Log("example")
    >>> from distributed.utils_test import captured_logger
    >>> with captured_logger(log.logger.name) as lines:
    ...     log.warning("%s is late", "a", deployment="m", stimulus_id="daskinfer-1")
    >>> lines.getvalue()
    "a is late [deployment='m' stimulus_id='daskinfer-1']\n"
    """

    def __init__(self, module: str) -> None:
        super().__init__(logging.getLogger(f"distributed.inference.{module}"), {})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a line, unless too many like it have just been written."""
        about = {field: kwargs.pop(field, None) for field in _FIELDS}
        limited = kwargs.pop("limited", True)
        if not self.isEnabledFor(level):
            return
        for field in ("deployment", "version"):
            if about[field] is not None:
                # Whatever a message has brought.
                about[field] = shown(about[field])
        kind = _Kind(level, str(msg), about["deployment"])
        note = ""
        if limited and level > logging.DEBUG:
            now = monotonic()
            with _lock:
                over = list(_flood.over(now))
                admitted = _flood.admits(kind, now)
                is_last = _flood.is_last(kind)
            self._tell_left_out(over)
            if not admitted:
                return
            if is_last:
                note = f"; more of these are left out for {WINDOW:g} s"
        self._write(level, msg, args, about, note, kwargs)

    def _tell_left_out(self, over: list[tuple[Any, int]]) -> None:
        for (level, message, deployment), count in over:
            about = {"deployment": deployment}
            told = "%d lines were left out within %g s that said: %s"
            self._write(level, told, (count, WINDOW, message), about, "", {})

    def _write(
        self,
        level: int,
        msg: object,
        args: tuple[object, ...],
        about: dict[str, Any],
        note: str,
        kwargs: dict[str, Any],
    ) -> None:
        told = " ".join(f"{k}={v!r}" for k, v in about.items() if v is not None)
        end = note + (f" [{told}]" if told else "")
        text = str(msg) if args else str(msg).replace("%", "%%")
        extra = {**dict.fromkeys(_FIELDS), **about, **(kwargs.pop("extra", None) or {})}
        # Of the frames of this module nobody wants to know.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2
        self.logger.log(level, f"{text}%s", *args, end, extra=extra, **kwargs)


def begin_anew() -> None:
    """Forget what has been written; for tests, which follow each other quickly."""
    with _lock:
        _flood.clear()
