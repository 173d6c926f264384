"""Functions on threads that keep nothing of what they were given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from daskinfer.failure import contain


def run_on(
    threads: Executor, function: Callable[..., Any], *args: Any
) -> asyncio.Future[Any]:
    """Run a function on a thread; what it was given is free when it has ended.

    A pool's own record of a call has its arguments until after the answer. The
    traceback of an error leads there: if it is cleared before the thread has gone on,
    it keeps what the function had, models for instance, as long as itself.

    Parameters
    ----------
    threads
        Which to run it on.
    function, args
        What to run, as :func:`~daskinfer.failure.contain` does.

    Returns
    -------
    asyncio.Future
        Of the loop that runs.

    Examples
    --------
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> async def main():
    ...     with ThreadPoolExecutor(1) as threads:
    ...         return await run_on(threads, divmod, 7, 2)
    >>> asyncio.run(main())
    (3, 1)
    """
    given: list[Any] = [function, args]
    return asyncio.get_running_loop().run_in_executor(threads, contain, _run, given)


def _run(given: list[Any]) -> Any:
    args, function = given.pop(), given.pop()
    return function(*args)
