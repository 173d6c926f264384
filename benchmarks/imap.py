"""Inputs one after the other: ``imap`` against ``map`` of the same list.

5,000 rows of 784 floats, each a request of its own, through one dense layer on two
workers. ``map`` sends all and gathers all; ``imap`` sends as many as keep the workers
busy. Timed from the first call until all results are in hand, and until all that was
made for them is gone from the scheduler as well.

The requests that exist at a time must not become more with the length of the list.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed import Client

import daskinfer
from benchmarks.measure import alternate, cluster, settle
from benchmarks.models import plain_tiny
from benchmarks.report import Ratio

TITLE = "model.imap against model.map of the same list, two workers"


def run(smoke: bool = False) -> list[Ratio]:
    """Measure both orders of results, and how many requests there are at a time."""
    rows, rounds = (1000, 1) if smoke else (5000, 7)
    data = np.random.default_rng(0).random((rows, 1, 784), dtype=np.float32)
    xs = list(data)
    expected = np.concatenate([plain_tiny(x) for x in xs])
    with cluster(2) as client:
        model = daskinfer.deploy(
            client, factory="benchmarks.models:tiny", name="tiny", warmup=xs[0]
        )
        measured = alternate(
            {
                "map": lambda: _timed(
                    client, lambda: daskinfer.gather(model.map(xs)), expected
                ),
                "imap": lambda: _timed(client, lambda: list(model.imap(xs)), expected),
            },
            rounds,
        )
        few, many = (_most_at_a_time(model, xs * times) for times in (1, 4))
    in_hand, gone = (
        {
            way: statistics.median(times[i] for times in measured[way])
            for way in measured
        }
        for i in (0, 1)
    )
    return [
        *(
            Ratio(
                f"model.imap(xs) against model.map(xs), until {until}",
                seconds["map"] / seconds["imap"],
                0.95,
                detail=f"{rows / seconds['imap']:,.0f}/s of "
                f"{rows / seconds['map']:,.0f}/s",
            )
            for until, seconds in (("the last result", in_hand), ("all is gone", gone))
        ),
        Ratio(
            "requests at a time, four times the inputs",
            many / few,
            2,
            at_most=True,
            detail=f"{many:,} of {few:,}",
        ),
    ]


def _timed(
    client: Client, work: Callable[[], list[Any]], expected: npt.NDArray[np.float32]
) -> tuple[float, float]:
    """Seconds until the results are there, and until nothing else is."""
    started = perf_counter()
    results = work()
    in_hand = perf_counter() - started
    settle(client)
    gone = perf_counter() - started
    np.testing.assert_allclose(np.concatenate(results), expected, rtol=1e-4, atol=1e-5)
    return in_hand, gone


def _most_at_a_time(model: daskinfer.Model, xs: list[npt.NDArray[np.float32]]) -> int:
    """The most inputs that were read and had no result yet in the caller's hand."""
    read = most = 0

    def inputs() -> Iterator[npt.NDArray[np.float32]]:
        nonlocal read
        for x in xs:
            read += 1
            yield x

    for count, _ in enumerate(model.imap(inputs())):
        most = max(most, read - count)
    return most
