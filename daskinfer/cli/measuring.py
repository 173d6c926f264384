"""How fast a deployment answers a number of callers who each wait for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from daskinfer.handle import Model


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cell of the table.

    Attributes
    ----------
    batch_size, concurrency
        Rows of each request, and how many requests were under way at any time.
    requests, rows_per_second
        Those answered, and the throughput.
    p50, p95, p99
        Seconds from the call to the answer.
    rows_per_pass
        Rows of a forward pass; None if none was run.
    """

    batch_size: int
    concurrency: int
    requests: int
    rows_per_second: float
    p50: float
    p95: float
    p99: float
    rows_per_pass: float | None


class Example:
    """An input from which requests of any number of rows are made.

    Parameters
    ----------
    args, kwargs
        The model's arguments; arrays among them have rows along `batch_dim`.
    batch_dim
        None: each request is one sample, whatever its shape.

    Examples
    --------
    >>> example = Example((np.arange(2),), {}, 0)
    >>> example.rows(5)[0][0]
    array([0, 1, 0, 1, 0])
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batch_dim: int | None,
    ) -> None:
        self._args = args
        self._kwargs = dict(kwargs)
        self._batch_dim = batch_dim

    def rows(self, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with so many rows, which repeat those of the example.

        Raises
        ------
        ValueError
            If an argument has no rows, or several are asked for where a request is
            one sample.
        """
        if self._batch_dim is None:
            if count != 1:
                raise ValueError(
                    f"batch size {count}: a request of this deployment is one sample"
                )
            return self._args, self._kwargs
        repeated = [self._repeat(value, count, self._batch_dim) for value in self._args]
        return tuple(repeated), {
            name: self._repeat(value, count, self._batch_dim)
            for name, value in self._kwargs.items()
        }

    @staticmethod
    def _repeat(value: Any, count: int, axis: int) -> Any:
        if value.ndim <= axis or not value.shape[axis]:
            raise ValueError(
                f"the example has no rows: its shape is {value.shape}, and the batch "
                f"axis is {axis}"
            )
        return np.take(value, np.arange(count) % value.shape[axis], axis=axis)


def random_example(
    shape: tuple[int, ...], dtype: str, batch_dim: int | None
) -> np.ndarray[Any, Any]:
    """Make one row of the shape of a sample: uniform in [0, 1), or zeros for integers.

    Examples
    --------
    >>> random_example((3, 8, 8), "float32", 0).shape
    (1, 3, 8, 8)
    """
    kind = np.dtype(dtype)
    if kind.kind == "f":
        sample = np.random.default_rng(0).random(shape).astype(kind)
    else:
        sample = np.zeros(shape, kind)
    return sample if batch_dim is None else np.expand_dims(sample, batch_dim)


async def measure(
    model: Model, example: Example, batch_size: int, concurrency: int, seconds: float
) -> Measurement:
    """Keep so many requests under way for a time, and see how they fare.

    Parameters
    ----------
    model
        A handle of an asynchronous client.
    example
        What the requests are made of.
    batch_size, concurrency
        Rows of each request, and how many are under way.
    seconds
        For how long new ones are sent.

    Raises
    ------
    Exception
        What a request failed with.
    """
    args, kwargs = example.rows(batch_size)
    await model.submit(*args, **kwargs)
    latencies: list[float] = []
    before = await _passes(model)
    started = perf_counter()

    async def call_repeatedly() -> None:
        while True:
            sent = perf_counter()
            await model.submit(*args, **kwargs)
            latencies.append(perf_counter() - sent)
            if perf_counter() - started >= seconds:
                return

    callers = [asyncio.create_task(call_repeatedly()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*callers)
    finally:
        for caller in callers:
            caller.cancel()
    elapsed = perf_counter() - started
    after = await _passes(model)
    p50, p95, p99 = (float(x) for x in np.percentile(latencies, (50, 95, 99)))
    passes, rows = (now - then for now, then in zip(after, before, strict=True))
    return Measurement(
        batch_size,
        concurrency,
        len(latencies),
        len(latencies) * batch_size / elapsed,
        p50,
        p95,
        p99,
        rows / passes if passes else None,
    )


async def _passes(model: Model) -> tuple[int, int]:
    asked: Any = model.status()
    status = await asked
    return status.passes, status.rows
