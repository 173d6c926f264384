"""What an update costs those who send requests meanwhile.

Requests are sent at a steady rate, about a fifth of what the workers can do, while the
model is updated again and again. Compared is the 99th percentile of the latency: of
what was sent from shortly before each update until shortly after its switch, against
what was sent while nothing happened.
"""

from __future__ import annotations

import asyncio
import statistics
from time import perf_counter
from typing import Any

import numpy as np

import daskinfer
from benchmarks.measure import cluster, settle
from benchmarks.models import SteadyDevice
from benchmarks.report import Ratio

TITLE = "Updates under load"

WORKERS = 2
BATCH = 16
PASS_SECONDS = 0.02
#: Requests per second, of 1,600 that the workers can do.
RATE = 300.0
#: Seconds around a switch that count as its own.
AROUND = 0.5

X = np.zeros((1, 16), np.float32)


def run(smoke: bool = False) -> list[Ratio]:
    """Send requests, update the model, and compare."""
    updates = 3 if smoke else 12
    with cluster(WORKERS) as client:
        model = daskinfer.deploy(
            client,
            SteadyDevice(PASS_SECONDS),
            name="steady",
            batching=daskinfer.BatchPolicy(max_batch_size=BATCH),
            warmup=X,
        )
        load = _Load(model)
        client.sync(load.run, updates)
        settle(client)
    during, calm = load.split()
    return [
        Ratio(
            "99th percentile of the latency around a switch, of that without",
            _p99(during) / _p99(calm),
            2.0,
            at_most=True,
            detail=f"{1e3 * _p99(during):.1f} ms against {1e3 * _p99(calm):.1f} ms, "
            f"{updates} updates, {len(during)} and {len(calm)} requests",
        )
    ]


class _Load:
    """Requests at a steady rate, and updates among them."""

    def __init__(self, model: daskinfer.Model) -> None:
        self._model = model
        self._latencies: list[tuple[float, float]] = []
        self._switches: list[tuple[float, float]] = []
        self._pending: set[asyncio.Task[None]] = set()

    async def run(self, updates: int) -> None:
        """Send requests until so many updates have been made."""
        sending = asyncio.ensure_future(self._send())
        for number in range(updates):
            await asyncio.sleep(4 * AROUND)
            began = perf_counter()
            updating: Any = self._model.update(
                SteadyDevice(PASS_SECONDS), version=f"{number + 2}", warmup=X
            )
            await updating
            self._switches.append((began, perf_counter()))
        await asyncio.sleep(4 * AROUND)
        sending.cancel()
        await asyncio.gather(*self._pending)

    async def _send(self) -> None:
        due = perf_counter()
        while True:
            task = asyncio.ensure_future(self._ask())
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
            due += 1 / RATE
            await asyncio.sleep(max(due - perf_counter(), 0.0))

    async def _ask(self) -> None:
        sent = perf_counter()
        await self._model.submit(X)
        self._latencies.append((sent, perf_counter() - sent))

    def split(self) -> tuple[list[float], list[float]]:
        """Latencies around switches, and those of other times."""
        during: list[float] = []
        calm: list[float] = []
        started = self._latencies[0][0]
        for sent, seconds in self._latencies:
            if sent < started + AROUND:
                continue  # connections are made
            near = any(
                began - AROUND < sent < ended + AROUND
                for began, ended in self._switches
            )
            (during if near else calm).append(seconds)
        return during, calm


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]
