"""Two slow workers beside two fast ones, which should be as if they were not there.

Requests come at random times, at half the rate that two fast workers can answer. The
slow workers of the cluster of four take ten times as long for every batch. Measured is
the latency of the slowest percent, against a cluster that has the fast ones alone. The
models take their time without using the CPU, so that it is theirs alone.
"""

from __future__ import annotations

import asyncio
import random
from time import perf_counter

import numpy as np
from distributed import Client

import daskinfer
from benchmarks.measure import alternate, cluster, medians, settle
from benchmarks.models import UnevenDevice
from benchmarks.report import Ratio

TITLE = "Two slow workers of four against the two fast ones alone"

BATCH = 4
#: Mean seconds between requests, at half of what two fast workers can do.
INTERVAL = 2 * UnevenDevice.seconds / (2 * BATCH)


def run(smoke: bool = False) -> list[Ratio]:
    """Compare the tails of both clusters."""
    count, rounds = (200, 1) if smoke else (1_000, 5)
    with cluster(4) as mixed, cluster(2) as fast:
        slow = sorted(mixed.scheduler_info(n_workers=-1)["workers"])[:2]
        models = {"mixed": _deploy(mixed, slow), "fast": _deploy(fast, [])}
        clients = {"mixed": mixed, "fast": fast}
        tails = medians(
            alternate(
                {
                    name: lambda name=name: _tail(clients[name], models[name], count)
                    for name in models
                },
                rounds,
            )
        )
        rows = {w.address: w.rows for w in models["mixed"].status().workers}
    share = sum(rows[address] for address in slow) / sum(rows.values())
    return [
        Ratio(
            "p99 with two slow workers more",
            tails["mixed"] / tails["fast"],
            1.5,
            at_most=True,
            detail=f"{1e3 * tails['mixed']:.0f} ms of {1e3 * tails['fast']:.0f} ms; "
            f"the slow ones had {share:.1%} of the rows",
        )
    ]


def _deploy(client: Client, slow: list[str]) -> daskinfer.Model:
    return daskinfer.deploy(
        client,
        UnevenDevice(slow),
        name="uneven",
        batching=daskinfer.BatchPolicy(max_batch_size=BATCH),
        warmup=np.zeros((1, 16), np.float32),
    )


def _tail(client: Client, model: daskinfer.Model, count: int) -> float:
    """Seconds that all but one percent of the requests were answered in."""
    latencies: list[float] = client.sync(_arrive, model, count)
    settle(client)
    return float(np.percentile(latencies, 99))


async def _arrive(model: daskinfer.Model, count: int) -> list[float]:
    x = np.zeros((1, 16), np.float32)

    async def call() -> float:
        started = perf_counter()
        await model.submit(x)
        return perf_counter() - started

    # The same times in each round.
    gaps = random.Random(1)
    callers = []
    due = perf_counter()
    for _ in range(count):
        callers.append(asyncio.create_task(call()))
        due += gaps.expovariate(1 / INTERVAL)
        await asyncio.sleep(max(due - perf_counter(), 0))
    return list(await asyncio.gather(*callers))
