"""What a request costs the scheduler while few or many others wait.

The CPU time of the scheduler process for each request that is answered, with 100 and
with 10,000 requests in the queue all the while: for each answer a new request comes.
The model takes a constant time without using the CPU, so that the queue, and nothing
else, is as long as it should be.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from distributed import Client, Future, wait

import daskinfer
from benchmarks.measure import (
    alternate,
    cluster,
    count_tasks,
    medians,
    scheduler_cpu,
    settle,
    wait_for,
)
from benchmarks.models import SteadyDevice
from benchmarks.report import Ratio

TITLE = "Scheduler's CPU time per request, by requests waiting"

WORKERS = 2
BATCH = 16
#: Requests that come together, for as many that were answered.
PORTION = 4 * BATCH


def run(smoke: bool = False) -> list[Ratio]:
    """Compare the cost with a long queue and with a short one."""
    few, many, count, rounds = (100, 500, 320, 1) if smoke else (100, 10_000, 5_120, 5)
    with cluster(WORKERS) as client:
        x = np.zeros((1, 16), np.float32)
        model = daskinfer.deploy(
            client,
            SteadyDevice(),
            name="steady",
            batching=daskinfer.BatchPolicy(max_batch_size=BATCH),
            warmup=x,
        )
        seconds = medians(
            alternate(
                {
                    "few": lambda: _cost(client, model, x, few, count),
                    "many": lambda: _cost(client, model, x, many, count),
                },
                rounds,
            )
        )
    return [
        Ratio(
            f"{many:,} waiting against {few:,}",
            seconds["many"] / seconds["few"],
            1.2,
            at_most=True,
            detail=f"{1e6 * seconds['many']:.0f} µs of {1e6 * seconds['few']:.0f} µs",
        )
    ]


def _cost(
    client: Client, model: daskinfer.Model, x: Any, waiting: int, count: int
) -> float:
    """Scheduler's CPU seconds per answer while so many wait."""
    futures: deque[Future[Any]] = deque()
    # Beyond those that wait: two batches for each worker.
    futures.extend(model.map([x] * (waiting + 2 * BATCH * WORKERS)))
    # Taking them in is not what is measured.
    wait_for(lambda: count_tasks(client) >= len(futures))
    _turn_over(model, futures, x, PORTION)
    started = scheduler_cpu(client)
    _turn_over(model, futures, x, count)
    seconds = scheduler_cpu(client) - started
    futures.clear()
    settle(client)
    return seconds / count


def _turn_over(
    model: daskinfer.Model, futures: deque[Future[Any]], x: Any, count: int
) -> None:
    """Let so many be answered, and send one for each."""
    for _ in range(count // PORTION):
        wait([futures.popleft() for _ in range(PORTION)])
        futures.extend(model.map([x] * PORTION))
