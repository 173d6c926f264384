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
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from distributed import Client, Future, wait

import daskinfer
from benchmarks.measure import cluster, settle
from tests.soak.report import Report, throughput

#: Requests that are sent together, and how many such portions are under way.
PORTION = 500
UNDER_WAY = 3
#: Good ones, to measure the throughput with.
GOOD = 2_000

GOOD_ROW = np.ones((1, 16), np.float32)
BAD_ROW = -GOOD_ROW


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
        before = throughput(client, model, GOOD_ROW, GOOD)
        of_client, of_scheduler = [], []
        started = perf_counter()
        for _ in range(10):
            _fail(client, model, count // 10)
            settle(client)
            forget_keys()
            client.run_on_scheduler(forget_keys)
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
        after = throughput(client, model, GOOD_ROW, GOOD)
    return Report(
        f"{count:,} failing requests",
        {"the client": of_client, "the scheduler": of_scheduler},
        before,
        after,
        seconds,
    )


def forget_keys() -> None:
    """Have Dask forget how it took the latest keys of this process apart.

    It remembers 100,000 of them, which are 25 MB.
    """
    # Pickled by value: imports are its own.
    import gc

    from dask.utils import key_split

    key_split.cache_clear()
    gc.collect()


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


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--count", type=int, default=100_000)
    report = run(parser.parse_args().count)
    print(report)
    return int(not report.is_good)


if __name__ == "__main__":
    sys.exit(main())
