"""Answers that come piece by piece.

How many small chunks reach one client in a second, against a plain generator in this
process, and against what the same worker can send with Dask's ``log_event``; when the
first chunk is there, against the whole result of a plain request; and what short
streams take while long ones run on the same worker, against what they take alone.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Client, get_worker

import daskinfer
from benchmarks.measure import alternate, cluster, medians
from benchmarks.report import Ratio

TITLE = "Streams"

X = np.zeros((1, 16), np.float32)
TOPIC = "benchmark"
SHORT_CHUNKS = 5
#: What the steps of short and of long streams take.
SHORT_STEP = 0.0002
LONG_STEP = 0.002


def chunks(x: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Many chunks, as fast as can be."""
    for _ in range(count):
        yield x + 1


def working(x: np.ndarray, count: int, seconds: float) -> Iterator[np.ndarray]:
    """Chunks that take the device some time each."""
    for _ in range(count):
        until = perf_counter() + seconds
        while perf_counter() < until:
            pass
        yield x


def plain(x: np.ndarray) -> np.ndarray:
    """What one step computes."""
    return x + 1


def run(smoke: bool = False) -> list[Ratio]:
    """Read streams, and compare."""
    many = 2_000 if smoke else 20_000
    rounds = 1 if smoke else 5
    with cluster(1) as client:
        model = daskinfer.deploy(client, chunks, name="chunks")
        step = daskinfer.deploy(client, plain, name="plain", warmup=X)
        work = daskinfer.deploy(client, working, name="working")
        rates = medians(
            alternate(
                {
                    "stream": lambda: _rate(model.stream(X, count=many), many),
                    "generator": lambda: _rate(chunks(X, many), many),
                    "log_event": lambda: _events(client, many),
                },
                rounds,
            )
        )
        asks = 100 if smoke else 500
        first = medians(
            alternate(
                {
                    "stream": lambda: _first(model, asks),
                    "submit": lambda: _whole(step, asks),
                },
                rounds,
            )
        )
        short = 200 if smoke else 1_000
        p95 = medians(
            alternate(
                {
                    "alone": lambda: _short(client, work, short, 0),
                    "beside": lambda: _short(client, work, short, 10),
                },
                1 if smoke else 3,
            )
        )
    return [
        Ratio(
            "chunks per second through one client, of those of log_event",
            rates["stream"] / rates["log_event"],
            1.0,
            detail=f"{rates['stream']:,.0f} of {rates['log_event']:,.0f}/s",
        ),
        Ratio(
            "chunks per second through one client, of a generator in the process",
            rates["stream"] / rates["generator"],
            0.01,
            detail=f"{rates['stream']:,.0f} of {rates['generator']:,.0f}/s",
        ),
        Ratio(
            "time to the first chunk, of that of a plain request",
            first["stream"] / first["submit"],
            1.5,
            at_most=True,
            detail=f"{1e3 * first['stream']:.2f} ms against "
            f"{1e3 * first['submit']:.2f} ms",
        ),
        Ratio(
            "95th percentile of short streams beside ten long ones, of that alone",
            p95["beside"] / p95["alone"],
            1.5,
            at_most=True,
            detail=f"{1e3 * p95['beside']:.0f} ms against {1e3 * p95['alone']:.0f} ms, "
            f"{short:,} streams of {SHORT_CHUNKS} chunks at once",
        ),
    ]


def _rate(stream: Iterator[Any], count: int) -> float:
    started = perf_counter()
    assert sum(1 for _ in stream) == count
    return count / (perf_counter() - started)


def _events(client: Client, count: int) -> float:
    """Events per second from a task on the worker to this client."""
    left, done = count, threading.Event()

    def arrived(event: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    def send(x: np.ndarray, count: int) -> None:
        worker = get_worker()
        for _ in range(count):
            worker.log_event(TOPIC, (x + 1).tobytes())

    client.subscribe_topic(TOPIC, arrived)
    started = perf_counter()
    client.submit(send, X, count, pure=False).result()
    done.wait(120)
    seconds = perf_counter() - started
    client.unsubscribe_topic(TOPIC)
    return (count - left) / seconds


def _first(model: daskinfer.Model, count: int) -> float:
    """Seconds until the first chunk of a stream."""
    times = []
    for _ in range(count):
        started = perf_counter()
        with model.stream(X, count=2) as stream:
            next(stream)
            times.append(perf_counter() - started)
    return statistics.median(times)


def _whole(model: daskinfer.Model, count: int) -> float:
    """Seconds until a plain request is answered."""
    times = []
    for _ in range(count):
        started = perf_counter()
        model.submit(X).result()
        times.append(perf_counter() - started)
    return statistics.median(times)


def _short(client: Client, model: daskinfer.Model, count: int, long: int) -> float:
    """95th percentile of the seconds that short streams take, beside long ones."""
    measured: float = client.sync(_read_short, model, count, long)
    return measured


async def _read_short(model: daskinfer.Model, count: int, long: int) -> float:
    endless = model.options(keep=False)
    reading = [
        asyncio.ensure_future(_drain(endless.stream(X, count=10**9, seconds=LONG_STEP)))
        for _ in range(long)
    ]
    await asyncio.sleep(0.2)
    try:
        times = await asyncio.gather(*(_timed(model) for _ in range(count)))
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return statistics.quantiles(times, n=20)[-1]


async def _drain(stream: Any) -> None:
    with stream:
        async for _ in stream:
            pass


async def _timed(model: daskinfer.Model) -> float:
    started = perf_counter()
    async for _ in model.stream(X, count=SHORT_CHUNKS, seconds=SHORT_STEP):
        pass
    return perf_counter() - started
