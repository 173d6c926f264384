"""Very many streams, half of them left, and a reader that sleeps: memory stays flat.

    python -m tests.soak.streams [--count 10000] [--chunks 100000]

Run it from the repository's folder. A scheduler and two workers are processes of their
own. Streams of five chunks are opened; every second one is left after its first. Then
one reader of an endless stream sleeps, while others read many chunks. The exit status
is 1 if a bar is missed.
"""

from __future__ import annotations

import os

# Of this process and of all that it starts; set before torch and Dask are imported.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from distributed import Client

import daskinfer
from benchmarks.measure import cluster, settle, wait_for
from tests.soak.__main__ import forget_keys
from tests.soak.report import ROUNDS, Report, throughput

#: Streams that are open at a time.
PORTION = 250
#: Chunks of each that is not left.
CHUNKS = 5
#: Bytes of a chunk of what is read while another reader sleeps.
LARGE = 16 * 1024
#: Requests to measure what one costs.
GOOD = 1_000

ROW = np.ones((1, 16), np.float32)


def giving() -> Callable[[int, int], Iterator[Any]]:
    """Make a model that gives so many chunks of so many bytes; -1: without end."""

    # Pickled by value: the workers don't import the tests.
    def give(chunks: int, nbytes: int) -> Iterator[Any]:
        import itertools

        for number in range(chunks) if chunks >= 0 else itertools.count():
            yield number, bytes(nbytes)

    return give


class Memory:
    """Resident bytes of all processes, at one time after the other."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._scheduler = psutil.Process(client.run_on_scheduler(os.getpid))
        self._workers = [psutil.Process(p) for p in client.run(os.getpid).values()]
        self.sizes: dict[str, list[int]] = {
            "the client": [],
            "the scheduler": [],
            "the workers": [],
        }

    def __repr__(self) -> str:
        return f"<Memory of {', '.join(self.sizes)}>"

    def look(self) -> None:
        """Note what each has."""
        forget_keys()
        self._client.run_on_scheduler(forget_keys)
        workers = sum(worker.memory_info().rss for worker in self._workers)
        for who, size in [
            ("the client", psutil.Process().memory_info().rss),
            ("the scheduler", self._scheduler.memory_info().rss),
            ("the workers", workers),
        ]:
            self.sizes[who].append(size)


def leaving(count: int) -> Report:
    """Open so many streams, and leave every second one after its first chunk."""
    with cluster(2) as client:
        model = daskinfer.deploy(client, giving(), name="giving")
        plain = daskinfer.deploy(client, _same, name="plain", warmup=ROW)
        memory = Memory(client)
        before = throughput(client, plain, ROW, GOOD)
        started = perf_counter()
        for _ in range(10):
            for start in range(0, count // 10, PORTION):
                _use(model, min(PORTION, count // 10 - start))
            settle(client)
            memory.look()
        seconds = perf_counter() - started
        # The latest that were left end with their next step.
        wait_for(lambda: not any(_left(client).values()))
        after = throughput(client, plain, ROW, GOOD)
        left = _left(client)
    return Report(
        f"{10 * (count // 10):,} streams, half of them left",
        memory.sizes,
        before,
        after,
        seconds,
        left,
    )


def sleeping(chunks: int) -> Report:
    """Let one reader sleep while others read so many chunks."""
    with cluster(1) as client:
        model = daskinfer.deploy(client, giving(), name="giving")
        memory = Memory(client)
        before = _rate(model, chunks // 20)
        sleeper = model.options(keep=False).stream(-1, LARGE)
        assert next(sleeper)[0] == 0
        after = _rate(model, chunks // 20)
        started = perf_counter()
        for _ in range(10):
            _read(model, chunks // 10)
            memory.look()
        seconds = perf_counter() - started
        # It wakes up, and has missed nothing.
        numbers = [number for number, _ in islice(sleeper, 1_000)]
        assert numbers == list(range(1, 1_001)), numbers[:10]
        sleeper.close()
        settle(client)
        wait_for(lambda: not any(_left(client).values()))
        left = _left(client)
    return Report(
        f"{10 * (chunks // 10):,} chunks beside a reader that sleeps",
        memory.sizes,
        before,
        after,
        seconds,
        left,
    )


def _same(x: Any) -> Any:
    return x


def _use(model: daskinfer.Model, count: int) -> None:
    streams = [model.stream(CHUNKS, 100) for _ in range(count)]
    for number, stream in enumerate(streams):
        if number % 2:
            assert next(stream)[0] == 0
            stream.close()
        else:
            assert [at for at, _ in stream] == list(range(CHUNKS))


def _read(model: daskinfer.Model, chunks: int) -> None:
    with model.options(keep=False).stream(chunks, LARGE) as stream:
        assert sum(1 for _ in stream) == chunks


def _rate(model: daskinfer.Model, chunks: int) -> float:
    """Chunks per second that a reader gets, the median of several rounds."""
    rates = []
    for _ in range(ROUNDS + 1):
        started = perf_counter()
        _read(model, chunks)
        rates.append(chunks / (perf_counter() - started))
    return statistics.median(rates[1:])


def _left(client: Client) -> dict[str, int]:
    """What scheduler and workers still know of streams."""

    def of_scheduler(dask_scheduler: Any) -> dict[str, int]:
        plugin = dask_scheduler.plugins["daskinfer"]
        streams = plugin.dispatcher.streams
        lines = plugin.dispatcher.lines.values()
        return {
            "tasks": len(dask_scheduler.tasks),
            "requests": len(plugin.requests),
            "live streams": len(streams.live),
            "unwanted streams": len(streams._unwanted),
            "streaming": sum(line.streaming.total() for line in lines),
        }

    def of_worker(dask_worker: Any) -> int:
        return int(dask_worker.plugins["daskinfer-runtime"].streams.count)

    on_workers = sum(client.run(of_worker).values())
    return client.run_on_scheduler(of_scheduler) | {"on workers": on_workers}


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.streams")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--chunks", type=int, default=100_000)
    wanted = parser.parse_args()
    reports = [leaving(wanted.count), sleeping(wanted.chunks)]
    for report in reports:
        print(report)
    return int(not all(report.is_good for report in reports))


if __name__ == "__main__":
    sys.exit(main())
