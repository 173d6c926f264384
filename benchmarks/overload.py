"""Twice as many requests as two workers can serve, where few may wait (``max_queue``).

First the same clients' requests keep the workers busy and never wait for long: that
is their capacity. Then requests arrive at twice that rate, each with a deadline, for
half a minute. Those that are turned away should know it at once, those that are
taken should be answered in time, and the workers should not lose a moment by it. The
model takes a constant time without using the CPU.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Future

import daskinfer
from benchmarks.measure import cluster, settle
from benchmarks.models import SteadyDevice
from benchmarks.report import Ratio

TITLE = "Overload at twice the capacity"

WORKERS = 2
BATCH = 16
PASS_SECONDS = 0.1
#: Three batches for each worker wait, and two are under way.
MAX_QUEUE = 3 * BATCH * WORKERS
#: Twice what these five take.
DEADLINE = 2 * 5 * PASS_SECONDS

X = np.zeros((1, 16), np.float32)


@dataclass
class Ends:
    """How long requests took to end, by how they ended.

    Attributes
    ----------
    answered, late, rejected
        Seconds from when each was sent.
    in_time
        Answers that came while requests still arrived.
    """

    answered: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)
    in_time: int = 0


def run(smoke: bool = False) -> list[Ratio]:
    """Measure the capacity, and then what becomes of twice as many requests."""
    calm, seconds = (2.0, 3.0) if smoke else (10.0, 30.0)
    with cluster(WORKERS) as client:
        model = daskinfer.deploy(
            client,
            SteadyDevice(PASS_SECONDS),
            name="crowded",
            batching=daskinfer.BatchPolicy(max_batch_size=BATCH),
            warmup=X,
            max_queue=MAX_QUEUE,
        )
        _capacity(model, calm / 4)
        capacity = _capacity(model, calm)
        settle(client)
        ends: Ends = client.sync(_crowd, model, 2 * capacity, seconds)
        settle(client)
    return _ratios(capacity, ends, seconds)


def _ratios(capacity: float, ends: Ends, seconds: float) -> list[Ratio]:
    rate = ends.in_time / seconds
    taken = len(ends.answered) + len(ends.late)
    rejection = float(np.percentile(ends.rejected, 99))
    answer = float(np.median(ends.answered))
    rejected = len(ends.rejected) / (taken + len(ends.rejected))
    return [
        Ratio(
            "throughput at twice the capacity, against the capacity",
            rate / capacity,
            0.9,
            detail=f"{rate:,.0f}/s of {capacity:,.0f}/s; "
            f"{rejected:.0%} of the requests were turned away",
        ),
        Ratio(
            "requests that were taken and met their deadline",
            len(ends.answered) / taken,
            0.99,
            detail=f"{len(ends.answered):,} of {taken:,} within {DEADLINE:g} s",
        ),
        Ratio(
            "time to a rejection, p99, against an answer's median",
            rejection / answer,
            0.25,
            at_most=True,
            detail=f"{1e3 * rejection:.0f} ms of {1e3 * answer:.0f} ms; "
            f"median {1e3 * float(np.median(ends.rejected)):.1f} ms",
        ),
    ]


def _capacity(model: daskinfer.Model, seconds: float) -> float:
    """Answers per second while as many requests are under way as may wait."""
    portions: deque[list[Future[Any]]] = deque(
        model.map([X] * BATCH) for _ in range(MAX_QUEUE // BATCH)
    )
    started, answered = perf_counter(), 0
    while perf_counter() - started < seconds:
        answered += len(daskinfer.gather(portions.popleft()))
        portions.append(model.map([X] * BATCH))
    rate = answered / (perf_counter() - started)
    while portions:
        daskinfer.gather(portions.popleft())
    return rate


async def _crowd(model: daskinfer.Model, rate: float, seconds: float) -> Ends:
    """Send requests at a rate, whatever becomes of them."""
    ends = Ends()
    limited = model.options(timeout=DEADLINE)
    started = perf_counter()

    async def call() -> None:
        sent = perf_counter()
        try:
            await limited.submit(X)
        except daskinfer.Overloaded:
            ends.rejected.append(perf_counter() - sent)
        except daskinfer.DeadlineExceeded:
            ends.late.append(perf_counter() - sent)
        else:
            ended = perf_counter()
            ends.answered.append(ended - sent)
            ends.in_time += ended - started <= seconds

    calls, due = [], started
    while due - started < seconds:
        calls.append(asyncio.create_task(call()))
        due += 1 / rate
        await asyncio.sleep(max(due - perf_counter(), 0))
    await asyncio.gather(*calls)
    return ends
