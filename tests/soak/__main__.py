"""Very many failing requests: memory stays flat, and throughput what it was.

    python -m tests.soak [--count 100000]

Run it from the repository's folder. A scheduler and two workers are processes of their
own. Nine of ten requests are sent with the handle, the others with Dask's client. All
are failed by the model's own exception, which the client looks at. The exit status is 1
if a bar is missed.
"""

from __future__ import annotations

import os

# Of this process and of all that it starts; set before torch and Dask are imported.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import gc
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from distributed import Client, Future, wait

import daskinfer
from benchmarks.measure import cluster, settle

#: Requests that are sent together, and how many such portions are under way.
PORTION = 500
UNDER_WAY = 3
#: Good ones, to measure the throughput with ...
GOOD = 2_000
#: ... this often.
ROUNDS = 5

GOOD_ROW = np.ones((1, 16), np.float32)
BAD_ROW = -GOOD_ROW


@dataclass(frozen=True)
class Report:
    """What was measured.

    Attributes
    ----------
    client, scheduler
        Resident memory of the process in bytes, after each tenth of the requests.
    before, after
        Answers per second before the failing requests, and after them.
    seconds
        What the failing requests took.
    """

    count: int
    client: list[int]
    scheduler: list[int]
    before: float
    after: float
    seconds: float

    @property
    def growth(self) -> dict[str, float]:
        """Memory after the last tenth, against that after the first."""
        return {
            "client": self.client[-1] / self.client[0],
            "scheduler": self.scheduler[-1] / self.scheduler[0],
        }

    @property
    def throughput(self) -> float:
        """Throughput afterwards, against that before."""
        return self.after / self.before

    def __str__(self) -> str:
        def told(values: list[int]) -> str:
            return " ".join(f"{value / 2**20:.0f}" for value in values)

        growth = self.growth
        return (
            f"{self.count:,} failing requests in {self.seconds:.0f} s\n"
            f"client's memory after each tenth, MiB: {told(self.client)}; "
            f"last against first {growth['client']:.3f}\n"
            f"scheduler's: {told(self.scheduler)}; "
            f"last against first {growth['scheduler']:.3f}\n"
            f"throughput after against before: {self.throughput:.2f} "
            f"({self.after:,.0f}/s of {self.before:,.0f}/s)"
        )


def refusing() -> Callable[[Any], Any]:
    """Make a model that fails for negative rows."""

    # Pickled by value: the workers don't import the tests.
    def refuse(x: np.ndarray) -> np.ndarray:
        if (x < 0).any():
            raise ArithmeticError("negative")
        return x

    return refuse


def run(count: int) -> Report:
    """Let so many requests fail."""
    with cluster(2) as client:
        model = daskinfer.deploy(client, refusing(), name="refusing", warmup=GOOD_ROW)
        process = psutil.Process(client.run_on_scheduler(os.getpid))
        ours = psutil.Process()
        before = _throughput(client, model)
        of_client, of_scheduler = [], []
        started = perf_counter()
        for _ in range(10):
            _fail(client, model, count // 10)
            settle(client)
            gc.collect()
            of_client.append(ours.memory_info().rss)
            of_scheduler.append(process.memory_info().rss)
            done = len(of_client) * (count // 10)
            print(
                f"{done:,} after {perf_counter() - started:.0f} s: "
                f"client {_mib(of_client)}, scheduler {_mib(of_scheduler)} MiB",
                flush=True,
            )
        seconds = perf_counter() - started
        status = model.status()
        assert status.failures == 10 * (count // 10), status
        assert (status.waiting, status.in_flight) == (0, 0), status
        assert all(worker.healthy for worker in status.workers), status
        after = _throughput(client, model)
    return Report(count, of_client, of_scheduler, before, after, seconds)


def _mib(sizes: list[int]) -> str:
    return f"{sizes[-1] / 2**20:.0f}"


def _fail(client: Client, model: daskinfer.Model, count: int) -> None:
    portions: deque[list[Future[Any]]] = deque()
    for start in range(0, count, PORTION):
        rows = [BAD_ROW] * min(PORTION, count - start)
        # Every tenth portion goes the way of Dask's own calls.
        plain = start // PORTION % 10 == 9
        portions.append(
            client.map(model, rows, pure=False) if plain else model.map(rows)
        )
        if len(portions) == UNDER_WAY:
            _look_at(portions.popleft())
    while portions:
        _look_at(portions.popleft())


def _look_at(futures: list[Future[Any]]) -> None:
    wait(futures)
    for future in futures:
        error = future.exception()
        assert type(error) is ArithmeticError, error


def _throughput(client: Client, model: daskinfer.Model) -> float:
    rates = []
    for _ in range(ROUNDS + 1):
        started = perf_counter()
        futures = model.map([GOOD_ROW] * GOOD)
        assert len(daskinfer.gather(futures)) == GOOD
        rates.append(GOOD / (perf_counter() - started))
        del futures
        settle(client)
    return statistics.median(rates[1:])


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--count", type=int, default=100_000)
    report = run(parser.parse_args().count)
    print(report)
    held = max(report.growth.values()) <= 1.1 and report.throughput >= 0.9
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
