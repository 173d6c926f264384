"""What cached results bring where requests repeat, and cost where they do not.

Requests are drawn from a Zipf distribution, as popular things are asked for: the second
most frequent half as often as the first, nearly. The model takes a constant time for
each row without using the CPU. All caches begin empty. The other workload are requests
of which no two are equal, to a small network: its cache turns itself off.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed import Client, Future, wait

import daskinfer
from benchmarks.measure import alternate, cluster, medians, settle
from benchmarks.models import RowDevice
from benchmarks.report import Ratio
from daskinfer import BatchPolicy, CachePolicy

TITLE = "Requests that repeat, and that do not, with a cache of results"

WORKERS = 2
#: The workload: Zipf's exponent, and how many different requests there are.
EXPONENT, KEYS = 1.1, 10_000
BATCH = 8
#: Requests that are under way, and how many are sent at once when as many have come.
UNDER_WAY, PORTION = 128, 32

AFFINE, ALONE, UNCACHED = "with affinity", "without affinity", "not cached"
POLICIES: dict[str, CachePolicy | None] = {
    AFFINE: CachePolicy(),
    ALONE: CachePolicy(affinity=False),
    UNCACHED: None,
}


def run(smoke: bool = False) -> list[Ratio]:
    """Compare requests per second with and without a cache."""
    count, uncached, unique, rounds = (
        (600, 100, 1_000, 1) if smoke else (10_000, 1_000, 20_000, 3)
    )
    counts = {AFFINE: count, ALONE: count, UNCACHED: uncached}
    with cluster(WORKERS) as client:
        rates = medians(
            alternate(
                {
                    way: _repeating(client, policy, counts[way])
                    for way, policy in POLICIES.items()
                },
                1,
            )
        )
        different = medians(
            alternate(
                {
                    way: _different(client, POLICIES[way], unique)
                    for way in (AFFINE, UNCACHED)
                },
                rounds,
            )
        )
    plain = rates[UNCACHED]
    return [
        *(
            Ratio(
                f"Zipf {EXPONENT}, {KEYS:,} keys, {way}, against not cached",
                rates[way] / plain,
                required,
                detail=f"{rates[way]:,.0f}/s of {plain:,.0f}/s",
            )
            for way, required in ((AFFINE, 3.0), (ALONE, 2.5))
        ),
        Ratio(
            f"{unique:,} different requests, cached against not",
            different[AFFINE] / different[UNCACHED],
            0.9,
            detail=f"{different[AFFINE]:,.0f}/s of {different[UNCACHED]:,.0f}/s",
        ),
    ]


def draw(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Draw keys from 0 up, the most frequent first."""
    weights = np.arange(1, KEYS + 1, dtype=float) ** -EXPONENT
    rng = np.random.default_rng(seed)
    return rng.choice(KEYS, size=count, p=weights / weights.sum())


def _repeating(
    client: Client, policy: CachePolicy | None, count: int
) -> Callable[[], float]:
    inputs = [np.full((1, 16), key, np.float32) for key in draw(count)]

    def measure() -> float:
        model = daskinfer.deploy(
            client,
            RowDevice(),
            name="rows",
            batching=BatchPolicy(max_batch_size=BATCH),
            warmup=np.full((1, 16), -1, np.float32),
            cache=policy,
        )
        return _rate(client, model, inputs)

    return measure


def _different(
    client: Client, policy: CachePolicy | None, count: int
) -> Callable[[], float]:
    rng = np.random.default_rng(0)
    inputs = list(rng.random((count, 1, 784), dtype=np.float32))
    rounds = itertools.count()

    def measure() -> float:
        # Of a name that was there before, the client knows what its cache was worth.
        kind = "plain" if policy is None else "cached"
        model = daskinfer.deploy(
            client,
            factory="benchmarks.models:tiny",
            name=f"{kind}-{next(rounds)}",
            warmup=inputs[0],
            cache=policy,
        )
        return _rate(client, model, inputs, under_way=1024)

    return measure


def _rate(
    client: Client,
    model: daskinfer.Model,
    inputs: list[Any],
    under_way: int = UNDER_WAY,
) -> float:
    """Requests that are answered per second; the model is gone afterwards."""
    futures: deque[Future[Any]] = deque()
    started = perf_counter()
    for begin in range(0, len(inputs), PORTION):
        if len(futures) >= under_way:
            wait([futures.popleft() for _ in range(PORTION)])
        futures.extend(model.map(inputs[begin : begin + PORTION]))
    wait(list(futures))
    seconds = perf_counter() - started
    assert all(future.status == "finished" for future in futures)
    futures.clear()
    settle(client)
    model.undeploy()
    return len(inputs) / seconds
