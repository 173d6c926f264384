"""The learned batch size against the best fixed one, for networks that differ.

One worker and all requests of one row at once: how fast are they answered with the
size that the batcher has learned, and with each fixed size? And few requests, at
random times: is an answer as early as without any batching?
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Client

import daskinfer
from benchmarks.measure import alternate, cluster, medians, settle
from benchmarks.report import Ratio
from daskinfer import BatchPolicy, Model

TITLE = "Learned batch size against the best fixed one, one worker"

SIZES = (1, 2, 4, 8, 16, 32, 64)
#: Fixed sizes that are measured again, in turns with the learned one.
FINALISTS = 2


@dataclass(frozen=True)
class Network:
    """A network, and how many requests of which shape it is given.

    A multiple of every size, so that with a fixed one no last batch has to wait.
    """

    name: str
    factory: str
    shape: tuple[int, ...]
    requests: int


NETWORKS = (
    Network("digits CNN", "daskinfer.demo.digits:load_model", (1, 1, 8, 8), 4096),
    Network("MLP", "benchmarks.models:mlp", (1, 784), 2048),
    Network("transformer", "benchmarks.models:transformer", (1, 64, 128), 1024),
    Network("wide CNN", "benchmarks.models:wide_conv", (1, 3, 48, 48), 1024),
)


def run(smoke: bool = False) -> list[Ratio]:
    """Sweep the sizes of each network and compare."""
    with cluster(1) as client:
        return [
            ratio
            for network in (NETWORKS[:2] if smoke else NETWORKS)
            for ratio in _compare(client, network, smoke)
        ]


def _compare(client: Client, network: Network, smoke: bool) -> Iterator[Ratio]:
    rounds, low_load, sizes = (1, 6, SIZES[::4]) if smoke else (5, 100, SIZES)
    # Single rounds differ by a fifth.
    many_rounds = 1 if smoke else 15
    count = network.requests // (32 if smoke else 1)
    generator = np.random.default_rng(0)
    xs = list(generator.random((count, *network.shape), dtype=np.float32))

    def deploy(label: str, policy: BatchPolicy) -> Model:
        return daskinfer.deploy(
            client,
            factory=network.factory,
            name=f"{network.factory.rpartition(':')[2]}-{label}",
            batching=policy,
            warmup=xs[0],
        )

    learned = deploy("learned", BatchPolicy(max_batch_size=sizes[-1]))
    fixed = {
        n: deploy(str(n), BatchPolicy(max_batch_size=n, min_batch_size=n))
        for n in sizes
    }

    def timed(model: Model) -> float:
        started = perf_counter()
        futures = model.map(xs)
        results = daskinfer.gather(futures)
        seconds = perf_counter() - started
        assert len(results) == count
        del futures
        settle(client)
        return seconds

    sweep = medians(alternate({str(n): partial(timed, m) for n, m in fixed.items()}, 1))
    finalists = sorted(sizes, key=lambda n: sweep[str(n)])[:FINALISTS]
    ways = {"learned": partial(timed, learned)}
    ways |= {str(n): partial(timed, fixed[n]) for n in finalists}
    before = learned.status()
    seconds = medians(alternate(ways, many_rounds))
    after = learned.status()
    size = (after.rows - before.rows) / (after.passes - before.passes)
    best = min(map(str, finalists), key=seconds.__getitem__)
    yield Ratio(
        f"{network.name}: throughput, against batches of {best}",
        seconds[best] / seconds["learned"],
        0.92,
        detail=f"{count / seconds['learned']:,.0f}/s (mean batch {size:.0f}) of "
        f"{count / seconds[best]:,.0f}/s",
    )

    # A fifth of what one after the other would be.
    alone = _Latency(client, fixed[1], xs[0])
    interval = 5 * alone.measure(max(low_load // 5, 3), 0.0)
    together = _Latency(client, learned, xs[0])
    p50 = medians(
        alternate(
            {
                "learned": lambda: together.measure(low_load, interval),
                "alone": lambda: alone.measure(low_load, interval),
            },
            rounds,
        )
    )
    yield Ratio(
        f"{network.name}: p50 at low load, against no batching",
        p50["learned"] / p50["alone"],
        1.1,
        at_most=True,
        detail=f"{1e3 * p50['learned']:.2f} ms of {1e3 * p50['alone']:.2f} ms",
    )
    for model in (learned, *fixed.values()):
        model.undeploy()


class _Latency:
    """Requests at random times, the same in each round."""

    def __init__(self, client: Client, model: Model, x: Any) -> None:
        self._client = client
        self._model = model
        self._x = x

    def measure(self, count: int, interval: float) -> float:
        """Median seconds of `count` requests, on average `interval` seconds apart."""
        latencies: list[float] = self._client.sync(self._arrive, count, interval)
        settle(self._client)
        return statistics.median(latencies)

    async def _arrive(self, count: int, interval: float) -> list[float]:
        gaps = random.Random(1)
        callers = []
        for _ in range(count):
            callers.append(asyncio.create_task(self._call()))
            if interval:
                await asyncio.sleep(gaps.expovariate(1 / interval))
            else:
                await callers[-1]
        return list(await asyncio.gather(*callers))

    async def _call(self) -> float:
        started = perf_counter()
        await self._model.submit(self._x)
        return perf_counter() - started
