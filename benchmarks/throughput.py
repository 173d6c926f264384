"""Many small requests: against plain Dask on an equal cluster of its own.

5,000 rows of 784 floats, each a request (a task, for plain Dask) of its own, through
one dense layer on two workers. Timed from the first call until all results are in
hand. Plain Dask calls a function that keeps the model in the worker. Both clusters
run throughout, and work in turns.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Client, Future, wait

import daskinfer
from benchmarks.measure import alternate, cluster, medians, settle
from benchmarks.models import plain_tiny
from benchmarks.report import Ratio

TITLE = "Requests of one row: daskinfer against plain Dask, two workers"


def run(smoke: bool = False) -> list[Ratio]:
    """Measure all ways to send many requests, and one after the other."""
    # Fewer rows would measure what a single call costs, not what each of many does.
    rows, one_by_one, rounds = (1000, 20, 1) if smoke else (5000, 100, 5)
    data = np.random.default_rng(0).random((rows, 1, 784), dtype=np.float32)
    xs = list(data)
    expected = np.concatenate([plain_tiny(x) for x in xs])
    with cluster(2) as plain, cluster(2) as client, warnings.catch_warnings():
        # That is what plain Dask does with inputs that are in the client.
        warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
        model = daskinfer.deploy(
            client, factory="benchmarks.models:tiny", name="tiny", warmup=xs[0]
        )

        def many(
            used: Client,
            send: Callable[[], list[Future[Any]]],
            gather: Callable[[list[Future[Any]]], list[Any]],
        ) -> Callable[[], float]:
            return lambda: _time_many(used, send, gather, expected)

        seconds = medians(
            alternate(
                {
                    "plain map": many(
                        plain,
                        lambda: plain.map(plain_tiny, xs, pure=False),
                        plain.gather,
                    ),
                    "client.map": many(
                        client,
                        lambda: client.map(model, xs, pure=False),
                        client.gather,
                    ),
                    "model.map": many(client, lambda: model.map(xs), daskinfer.gather),
                    "plain submit": many(
                        plain,
                        lambda: [plain.submit(plain_tiny, x, pure=False) for x in xs],
                        plain.gather,
                    ),
                    "model.submit": many(
                        client,
                        lambda: [model.submit(x) for x in xs],
                        daskinfer.gather,
                    ),
                    # Results of a graph do not come unasked: all are fetched here.
                    "plain fetch": lambda: _time_fetch(
                        plain, plain.map(plain_tiny, xs, pure=False), plain.gather
                    ),
                    "our fetch": lambda: _time_fetch(
                        client, client.map(model, xs, pure=False), daskinfer.gather
                    ),
                    "plain one": lambda: _time_each(
                        lambda x: plain.submit(plain_tiny, x, pure=False),
                        xs[:one_by_one],
                    ),
                    "model one": lambda: _time_each(model.submit, xs[:one_by_one]),
                },
                rounds,
            )
        )

    def faster(name: str, ours: str, theirs: str, required: float) -> Ratio:
        return Ratio(
            name,
            seconds[theirs] / seconds[ours],
            required,
            detail=f"{rows / seconds[ours]:,.0f}/s of {rows / seconds[theirs]:,.0f}/s",
        )

    return [
        faster("client.gather(client.map(model, xs))", "client.map", "plain map", 5),
        faster("daskinfer.gather(model.map(xs))", "model.map", "plain map", 8),
        faster("model.submit(x) one by one", "model.submit", "plain submit", 8),
        faster("daskinfer.gather of finished futures", "our fetch", "plain fetch", 10),
        Ratio(
            "model.submit(x).result(), p50",
            seconds["model one"] / seconds["plain one"],
            0.35,
            at_most=True,
            detail=f"{1e3 * seconds['model one']:.1f} ms of "
            f"{1e3 * seconds['plain one']:.1f} ms",
        ),
    ]


def _time_many(
    client: Client,
    send: Callable[[], list[Future[Any]]],
    gather: Callable[[list[Future[Any]]], list[Any]],
    expected: np.ndarray,
) -> float:
    started = perf_counter()
    futures = send()
    results = gather(futures)
    seconds = perf_counter() - started
    np.testing.assert_allclose(np.concatenate(results), expected, rtol=1e-4, atol=1e-5)
    del futures
    settle(client)
    return seconds


def _time_fetch(
    client: Client,
    futures: list[Future[Any]],
    gather: Callable[[list[Future[Any]]], list[Any]],
) -> float:
    wait(futures)
    started = perf_counter()
    results = gather(futures)
    seconds = perf_counter() - started
    assert len(results) == len(futures)
    del futures
    settle(client)
    return seconds


def _time_each(submit: Callable[[Any], Future[Any]], xs: Sequence[Any]) -> float:
    """Median seconds of one request after the other."""
    latencies = []
    for x in xs:
        started = perf_counter()
        submit(x).result()
        latencies.append(perf_counter() - started)
    return statistics.median(latencies)
