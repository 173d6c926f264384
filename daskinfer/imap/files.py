"""From a list of files to a list of results."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

from daskinfer.fields import size
from daskinfer.imap.window import Unreadable

if TYPE_CHECKING:
    from daskinfer.bound import BoundModel
    from daskinfer.handle import Model
    from daskinfer.imap.results import AsyncImap, Imap


def run_files(
    model: Model | BoundModel,
    paths: Iterable[str | PathLike[str]],
    load: Callable[[Any], Any],
    *,
    threads: int = 4,
    on_error: str = "raise",
    max_in_flight: int | str = "auto",
    progress: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Load files here, run a model over what is in them, and collect the results.

    Parameters
    ----------
    model
        The deployment, with options or without.
    paths
        The files; anything that ``load`` takes.
    load
        Makes a path into an input of the model. It is called in threads of this
        process, a few files ahead of the model.
    threads
        How many files are loaded at a time.
    on_error
        ``"raise"`` what became of the first file that failed, loading it included; or
        ``"return"`` exceptions in the places of results.
    max_in_flight
        As for :meth:`Model.imap`.
    progress
        Show a bar; needs tqdm.
    **kwargs
        Keywords of the model.

    Returns
    -------
    list
        The results, in the order of the paths. Awaitable with an asynchronous client.

    Raises
    ------
    TypeError
        ``paths`` is a single path, or ``load`` cannot be called.
    ImportError
        ``progress`` without tqdm.

    Notes
    -----
    Files that the workers see need not pass through this process: ``model.imap`` takes
    futures, as in ``model.imap(client.submit(load, path) for path in paths)``.
    """
    if isinstance(paths, str | bytes | PathLike):
        raise TypeError(f"paths must be a list of files, not the single {paths!r}")
    if not callable(load):
        raise TypeError(f"load must be a function of a path, not {load!r}")
    files, threads = list(paths), size("threads", threads)
    bar = _bar(len(files)) if progress else None
    pool = ThreadPoolExecutor(threads, "daskinfer-files")
    inputs = _loaded(pool, files, load, 2 * threads)
    how: dict[str, Any] = {"on_error": on_error, "max_in_flight": max_in_flight}
    with contextlib.ExitStack() as ending:
        ending.callback(_end, pool, bar)
        if model._bound()[0].client.asynchronous:
            results = model.aimap(inputs, **how, **kwargs)
            ending.pop_all()
            return cast("list[Any]", _collect_async(results, pool, bar))
        return _collect(model.imap(inputs, **how, **kwargs), bar)


def _loaded(
    pool: ThreadPoolExecutor, paths: list[Any], load: Callable[[Any], Any], ahead: int
) -> Iterator[Any]:
    """What is in the files, in order, loaded so many ahead."""
    left = iter(paths)
    loading = deque(pool.submit(load, path) for path in islice(left, ahead))
    while loading:
        first = loading.popleft()
        loading.extend(pool.submit(load, path) for path in islice(left, 1))
        error = first.exception()
        yield first.result() if error is None else Unreadable(error)


def _collect(results: Imap, bar: Any) -> list[Any]:
    found = []
    with results:
        for result in results:
            found.append(result)
            if bar is not None:
                bar.update()
    return found


async def _collect_async(
    results: AsyncImap, pool: ThreadPoolExecutor, bar: Any
) -> list[Any]:
    found = []
    try:
        async with results:
            async for result in results:
                found.append(result)
                if bar is not None:
                    bar.update()
    finally:
        _end(pool, bar)
    return found


def _end(pool: ThreadPoolExecutor, bar: Any) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    if bar is not None:
        bar.close()


def _bar(total: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "progress=True needs tqdm: pip install 'daskinfer[progress]'"
        ) from error
    return tqdm(total=total, unit="file")
