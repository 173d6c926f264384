"""Exceptions on their way from a worker to whoever waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.core import clean_exception, error_message

if TYPE_CHECKING:
    from daskinfer.protocol import Failure


def dump_failure(error: BaseException) -> Failure:
    """Put an exception into the form in which Dask ships it.

    What cannot be pickled travels as its text.

    Parameters
    ----------
    error
        The exception; its traceback goes with it.
    """
    try:
        # Dask looks for the traceback where exceptions are being handled.
        raise error
    except BaseException as caught:
        told = error_message(caught)
    return {
        "exception": told["exception"],
        "traceback": told["traceback"],
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
