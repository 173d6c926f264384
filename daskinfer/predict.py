"""One big array through a model: cut into pieces, a bounded number on their way.

The pieces are ordinary requests, larger than a forward pass, which the workers
cut into passes of the best size they know. Only :data:`daskinfer.predict.in-flight`
pieces per worker exist at a time, so neither the scheduler's memory nor the
workers' grows with the array.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from daskinfer import config, payload
from daskinfer.client import describe_one
from daskinfer.gather import gather_now
from daskinfer.submission import submitter

if TYPE_CHECKING:
    from distributed import Client, Future

    from daskinfer.handle import Model

#: Pieces per worker that an array is cut into, so that all end at about one time.
_PIECES_PER_WORKER = 16


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
        What the model raised on a piece; the pieces not begun are cancelled.
    """
    if not hasattr(data, "shape"):
        raise TypeError(
            f"predict takes one array with the rows of all requests, not "
            f"{type(data).__name__}; use model.map for many inputs"
        )
    client = model.client
    if hasattr(data, "__dask_graph__"):
        return client.sync(_predict_blocks, client, model, data, kwargs)
    return client.sync(_predict, client, model, data, kwargs)


async def _predict(
    client: Client, model: Model, data: Any, kwargs: dict[str, Any]
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
    piece = 1 if stacked else _piece_rows(data, axis, workers, about["max_batch_size"])
    window = config.integer("predict.in-flight") * workers
    if stacked:
        window *= about["max_batch_size"]
    submit = submitter(client)._submit_plain
    on_their_way: deque[Future[Any]] = deque()
    outputs: list[Any] = []
    sizes: list[int] = []
    try:
        for start, stop in _bounds(rows, piece):
            part = data[start] if stacked else _rows(data, axis, start, stop)
            if len(on_their_way) >= window:
                outputs += await _collect(client, on_their_way, stacked, window)
            on_their_way.append(submit(model, (part,), kwargs))
            sizes.append(stop - start)
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
    count = max(window // 2, 1) if stacked else 1
    oldest = [on_their_way[i] for i in range(min(count, len(on_their_way)))]
    results: list[Any] = await gather_now(client, oldest)
    for _ in oldest:
        on_their_way.popleft()
    return results


def _piece_rows(data: Any, axis: int, workers: int, max_rows: int) -> int:
    rows = data.shape[axis]
    bytes_per_row = max(data.nbytes // max(rows, 1), 1)
    affordable = config.nbytes("predict.chunk-bytes") // bytes_per_row
    even = -(-rows // (_PIECES_PER_WORKER * workers))
    # Whole passes, so that no piece ends in a small one.
    passes = max(min(affordable, even) // max_rows, 1)
    return int(passes * max_rows)


def _bounds(rows: int, piece: int) -> Iterator[tuple[int, int]]:
    if not rows:
        yield 0, 0
    for start in range(0, rows, piece):
        yield start, min(start + piece, rows)


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
    submit = submitter(client)._submit_plain
    for rows in (0, 1):
        shape[axis] = rows
        example = np.zeros(shape, data.dtype)
        future = submit(model, (example,), kwargs)
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
