"""Exceptions on their way from a worker to whoever waits."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import re
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distributed.core import clean_exception, error_message

from daskinfer.exceptions import InferenceError

if TYPE_CHECKING:
    from daskinfer.protocol import Failure


def contain(function: Callable[..., Any], *args: Any) -> Any:
    """Call code of the user's, whose exit is an error like any other.

    A ``SystemExit`` that reaches an event loop ends it, and its process with it.

    Parameters
    ----------
    function, args
        What to call.

    Raises
    ------
    InferenceError
        If the function raised what is no :class:`Exception`.
    Exception
        What the function raised.

    Examples
    --------
    >>> contain(exit, 1)
    Traceback (most recent call last):
        ...
    daskinfer.exceptions.InferenceError: the model would end its process: SystemExit(1)
    """
    try:
        return function(*args)
    except Exception:
        raise
    except BaseException as error:
        raise InferenceError(f"the model would end its process: {error!r}") from error


#: How the engine's own note on an exception begins.
_NOTE = "Raised in deployment "


def note_origin(
    error: BaseException, name: str, version: str, worker: str, about: str
) -> None:
    """Add to an exception where it was raised, as :meth:`BaseException.add_note` does.

    Parameters
    ----------
    error
        A model's own exception.
    name, version
        The deployment that raised it.
    worker
        Address of the worker.
    about
        Which request it was, and what its inputs look like.

    Examples
    --------
    >>> error = ValueError("no")
    >>> note_origin(error, "m", "1", "tcp://10.0.0.1:1", "request 'm-7'")
    >>> error.__notes__
    ["Raised in deployment 'm', version '1', on tcp://10.0.0.1:1; request 'm-7'"]
    """
    note = f"{_NOTE}{name!r}, version {version!r}, on {worker}; {about}"
    # A model may raise the same object again and again, or one that refuses to be
    # changed: it travels without a note then.
    with contextlib.suppress(Exception):
        others = [n for n in getattr(error, "__notes__", ()) if not _is_ours(n)]
        error.__notes__ = [*others, note]


def _is_ours(note: object) -> bool:
    return isinstance(note, str) and note.startswith(_NOTE)


def describe(error: BaseException) -> str:
    r"""An exception in one line.

    >>> describe(ValueError("no\nway")), describe(ValueError())
    ('ValueError: no', 'ValueError')
    """
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def origin(error: BaseException) -> str:
    """The type of an exception and where it was raised, without what it says.

    For logs: what a model says of its inputs may hold them.

    Examples
    --------
    >>> def forward(x):
    ...     raise ValueError(f"cannot use {x}")
    >>> try:
    ...     forward("secret")
    ... except ValueError as error:
    ...     origin(error)
    'ValueError in forward (<doctest daskinfer.failure.origin[0]>:2)'
    >>> origin(KeyError("secret"))
    'KeyError'
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return type(error).__name__
    code = last.tb_frame.f_code
    where = f"{code.co_filename}:{last.tb_lineno}"
    return f"{type(error).__name__} in {code.co_name} ({where})"


def type_of(failure: Failure) -> str:
    """The type of an exception that was packed elsewhere, as far as it can be told.

    >>> type_of(dump_failure(ValueError("secret")))
    'ValueError'
    """
    # Dask's text is what ``repr`` says, which a class may define as it likes.
    name = re.match(r"[A-Za-z_]\w*(?=\()", failure["exception_text"])
    return name[0] if name else "an exception"


def copied(error: BaseException | None) -> BaseException | None:
    """Copy an exception, so that raising it does not change the original.

    The traceback of one that is raised holds the frames that it went through, and
    everything that is in them. One that cannot be copied is returned itself.

    Examples
    --------
    >>> error = KeyError("k")
    >>> copied(error) is error, copied(error)
    (False, KeyError('k'))
    """
    try:
        again = copy.copy(error)
    except Exception:
        return error
    if again is None or error is None or type(again) is not type(error):
        return error
    again.__cause__, again.__context__ = error.__cause__, error.__context__
    again.__suppress_context__ = error.__suppress_context__
    return again.with_traceback(error.__traceback__)


_here = threading.local()


class _Discreet(logging.Filter):
    """Keeps exceptions that cannot be pickled out of Dask's logs.

    It would write down all that they say, though they then travel as their text.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_here, "is_dumping", False)


logging.getLogger("distributed.protocol.pickle").addFilter(_Discreet())


def dump_failure(error: BaseException) -> Failure:
    """Put an exception into the form in which Dask ships it.

    What cannot be pickled travels as its text.

    Parameters
    ----------
    error
        The exception; its traceback goes with it.
    """
    try:
        return _dump(error)
    except Exception as problem:
        # Its own code fails, such as that which puts it into words.
        told = InferenceError(
            f"the model raised {type(error).__qualname__}, which cannot be carried "
            f"to you: {type(problem).__name__}"
        )
    return _dump(told.with_traceback(error.__traceback__))


def _dump(error: BaseException) -> Failure:
    _here.is_dumping = True
    try:
        # Dask looks for the traceback where exceptions are being handled.
        raise error
    except BaseException as caught:
        told = error_message(caught)
    finally:
        _here.is_dumping = False
    traceback = told["traceback"]
    if traceback and not isinstance(pickle.loads(traceback.data), TracebackType):
        # Too deep to be pickled, Dask sends its text, on which clients choke.
        traceback = None
    return {
        "exception": told["exception"],
        "traceback": traceback,
        "exception_text": told["exception_text"],
        "traceback_text": told["traceback_text"],
    }


def load_failure(failure: dict[str, Any]) -> BaseException:
    """Rebuild the exception that :func:`dump_failure` packed, with its traceback.

    Parameters
    ----------
    failure
        As received: Dask has unwrapped the pickled parts by then.
    """
    _, error, traceback = clean_exception(**failure)
    assert error is not None
    return error.with_traceback(traceback)
