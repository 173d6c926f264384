"""One big array through a model: cut into pieces, a bounded number on their way.

The pieces are ordinary requests, larger than a forward pass, which the workers
cut into passes of the best size they know. Only :data:`daskinfer.predict.in-flight`
pieces per worker exist at a time, so neither the scheduler's memory nor the
workers' grows with the array.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from daskinfer import config, payload
from daskinfer.client import describe_one
from daskinfer.gather import gather_now
from daskinfer.options import NO_OPTIONS, CallOptions
from daskinfer.submission import submitter

if TYPE_CHECKING:
    from distributed import Client, Future

    from daskinfer.handle import Model

#: Pieces are no smaller than this share of one worker's part.
_SMALLEST_PIECE = 1 / 5


def predict(model: Model, data: Any, **kwargs: Any) -> Any:
    """Run a model over the rows of one array.

    Parameters
    ----------
    model
        The deployment.
    data : ndarray, torch.Tensor or dask.array.Array
        Rows along the deployment's ``batch_dim``, or samples along axis 0 where
        that is None.
    **kwargs
        Keywords of the model, the same for all rows.

    Returns
    -------
    The outputs of all rows, joined in order, in the containers and dtypes of the
    model's own output. For a dask array, a lazy dask array with the same chunks
    along the batch axis. Awaitable with an asynchronous client.

    Raises
    ------
    TypeError
        If ``data`` is no array.
    ValueError
        If there is no sample and the deployment stacks samples.
    Exception
        What the model raised on a piece; the pieces not begun are cancelled. To have
        the other rows answered all the same, use :meth:`Model.map`.

    See Also
    --------
    daskinfer.Model.map : one request, and one error, for each input.

    Notes
    -----
    No more pieces are on their way than ``max_queue`` allows to wait. The blocks of a
    dask array are sent by Dask, which does not know of it.
    """
    return predict_with(model, NO_OPTIONS, data, kwargs)


def predict_with(
    model: Model, options: CallOptions, data: Any, kwargs: dict[str, Any]
) -> Any:
    """As :func:`predict`; the options apply to each of its requests."""
    # Data frames have a shape too, but rows cannot be cut from them as from arrays.
    if not (hasattr(data, "shape") and hasattr(data, "dtype")):
        raise TypeError(
            f"predict takes one array with the rows of all requests, not "
            f"{type(data).__name__}; convert it to an array, or use model.map for "
            "many inputs"
        )
    client = model.client
    if hasattr(data, "__dask_graph__"):
        if options != NO_OPTIONS:
            # Dask drops annotations when it fuses the steps of a graph.
            raise ValueError(
                f"a dask array is lazy, and {', '.join(options.names())} would not "
                "reach the requests: give them to client.compute, and a time limit to "
                "deploy(request_timeout=...)"
            )
        return client.sync(_predict_blocks, client, model, data, kwargs)
    return client.sync(_predict, client, model, options, data, kwargs)


async def _predict(
    client: Client,
    model: Model,
    options: CallOptions,
    data: Any,
    kwargs: dict[str, Any],
) -> Any:
    about = await describe_one(client, model.name)
    axis, workers = model.batch_dim or 0, max(about["workers_ready"], 1)
    stacked = model.batch_dim is None
    rows = data.shape[axis]
    if stacked and not rows:
        raise ValueError(
            f"{model!r} stacks single samples (batch_dim=None), and there is none; "
            "what it answers to none is not known"
        )
    window = config.integer("predict.in-flight") * workers
    if stacked:
        window *= about["max_batch_size"]
        pieces: Iterator[int] = repeat(1, rows)
    else:
        pieces = _pieces(data, axis, workers, about["max_batch_size"])
    # Those that run do not wait, but may come back to the queue.
    window = min(window, about["max_queue"] or window)
    submit = partial(submitter(client).submit, model, options)
    # The results are wanted as soon as they exist, whatever their size.
    inline = None if stacked else config.nbytes("predict.chunk-bytes")
    on_their_way: deque[Future[Any]] = deque()
    outputs: list[Any] = []
    sizes: list[int] = []
    try:
        start = 0
        for size in pieces:
            part = data[start] if stacked else _rows(data, axis, start, start + size)
            start += size
            if len(on_their_way) >= window:
                outputs += await _collect(client, on_their_way, stacked, window)
            on_their_way.append(submit((part,), kwargs, inline))
            sizes.append(size)
        while on_their_way:
            outputs += await _collect(client, on_their_way, stacked, window)
    finally:
        if on_their_way:
            await client._cancel(list(on_their_way))
    if stacked:
        (joined,), _ = payload.collate([((output,), {}) for output in outputs], None)
        return joined
    return payload.join_outputs(outputs, sizes, axis)


async def _collect(
    client: Client, on_their_way: deque[Future[Any]], stacked: bool, window: int
) -> list[Any]:
    """Wait for the oldest pieces and fetch their results."""
    if stacked:
        oldest = list(islice(on_their_way, max(window // 2, 1)))
        results: list[Any] = await gather_now(client, oldest)
    else:
        oldest = [on_their_way[0]]
        results = [await on_their_way[0]]
    for _ in oldest:
        on_their_way.popleft()
    return results


def _pieces(data: Any, axis: int, workers: int, max_rows: int) -> Iterator[int]:
    """Rows of one piece after the other; a single empty one where there are none.

    In rounds of one equal piece per worker, large ones first, as each has its cost,
    and smaller ones towards the end, so that all workers end at about one time:
    factoring (Hummel, Schonberg and Flynn, 1992).
    """
    left = data.shape[axis]
    bytes_per_row = max(data.nbytes // max(left, 1), 1)
    largest = max(config.nbytes("predict.chunk-bytes") // bytes_per_row, 1)
    smallest = left * _SMALLEST_PIECE / workers
    if not left:
        yield 0
    while left:
        wanted = left // (2 * workers)
        if wanted < smallest:
            wanted = max(math.ceil(left / workers), max_rows)
        else:
            # Whole passes, so that no piece ends in a small one.
            wanted = max(wanted // max_rows, 1) * max_rows
        for _ in range(workers):
            rows = min(wanted, largest, left)
            if rows:
                yield rows
            left -= rows


def _rows(data: Any, axis: int, start: int, stop: int) -> Any:
    return data[(slice(None),) * axis + (slice(start, stop),)]


async def _predict_blocks(
    client: Client, model: Model, data: Any, kwargs: dict[str, Any]
) -> Any:
    """A dask array whose blocks are the model's outputs for the blocks of another."""
    axis = model.batch_dim
    if axis is None:
        raise ValueError(
            f"{model!r} stacks single samples (batch_dim=None), which blocks of a "
            "dask array are not; deploy it with batch_dim=0"
        )
    others = {i: -1 for i in range(data.ndim) if i != axis}
    data = data.rechunk(others)
    meta = await _meta(client, model, data, axis, kwargs)
    chunks = tuple(
        data.chunks[axis] if i == axis else (size,) for i, size in enumerate(meta.shape)
    )
    return data.map_blocks(
        model,
        **kwargs,
        dtype=meta.dtype,
        meta=meta,
        chunks=chunks,
        drop_axis=list(range(meta.ndim, data.ndim)),
        new_axis=list(range(data.ndim, meta.ndim)) or None,
    )


async def _meta(
    client: Client, model: Model, data: Any, axis: int, kwargs: dict[str, Any]
) -> Any:
    """What the model answers to no rows; or a single row's answer without it."""
    import numpy as np

    shape = list(data.shape)
    submit = partial(submitter(client).submit, model, NO_OPTIONS)
    for rows in (0, 1):
        shape[axis] = rows
        example = np.zeros(shape, data.dtype)
        future = submit((example,), kwargs)
        try:
            answer = await future
        except Exception:
            if rows:
                raise
        else:
            break
    if not hasattr(answer, "dtype"):
        raise TypeError(
            f"{model!r} returns {type(answer).__name__}, not one array, so its answers "
            "cannot be the blocks of a dask array"
        )
    return _rows(answer, axis, 0, 0)
