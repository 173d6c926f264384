"""How everything here is measured: on real processes, warm, in turns."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import psutil
from distributed import Client
from distributed.deploy.subprocess import SubprocessCluster

Measured = TypeVar("Measured")

_SAMPLE_SECONDS = 0.01
_SETTLED_WITHIN = 120.0


@contextmanager
def cluster(n_workers: int, nannies: bool = False) -> Iterator[Client]:
    """Start a scheduler and workers as processes of their own on this host.

    Each worker has one thread; with ``nannies`` one that dies is started again.
    Everything is gone when the block ends.
    """
    # Dask reads nothing of what they log, and a pipe that is full holds them up.
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")
    with (
        TemporaryDirectory() as folder,
        SubprocessCluster(
            host="127.0.0.1",
            dashboard_address=None,  # type: ignore[arg-type]
            worker_class="distributed.Nanny" if nannies else "distributed.Worker",
            n_workers=n_workers,
            threads_per_worker=1,
            # It would be left behind where it is by default.
            scheduler_kwargs={"scheduler_file": str(Path(folder, "scheduler.json"))},
        ) as processes,
        Client(processes) as client,
    ):
        client.wait_for_workers(n_workers)
        yield client


def alternate(
    ways: Mapping[str, Callable[[], Measured]], rounds: int
) -> dict[str, list[Measured]]:
    """Let all ways take turns and note what each returns.

    The first round warms up and is not counted. Every second one goes backwards, so
    that a machine that slows down or speeds up favours nobody.
    """
    measured: dict[str, list[Measured]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        order = list(ways) if number % 2 else list(ways)[::-1]
        for name in order:
            gc.collect()
            value = ways[name]()
            if number:
                measured[name].append(value)
    return measured


def medians(measured: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each way.

    >>> medians({"a": [1.0, 5.0, 2.0]})
    {'a': 2.0}
    """
    return {name: statistics.median(values) for name, values in measured.items()}


def settle(client: Client) -> None:
    """Wait until the scheduler has forgotten all tasks.

    Raises
    ------
    TimeoutError
        If it does not within two minutes: somebody holds on to futures.
    """
    gc.collect()
    wait_for(lambda: not count_tasks(client))


def wait_for(condition: Callable[[], bool]) -> None:
    """Ask again and again until a condition holds.

    Raises
    ------
    TimeoutError
        If it does not within two minutes.
    """
    deadline = time.monotonic() + _SETTLED_WITHIN
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not settled after {_SETTLED_WITHIN:.0f} s")
        time.sleep(_SAMPLE_SECONDS)


def count_tasks(client: Client) -> int:
    """How many tasks the scheduler knows of."""
    count: int = client.run_on_scheduler(_count_tasks)
    return count


def scheduler_cpu(client: Client) -> float:
    """CPU seconds that the scheduler process has used so far."""
    seconds: float = client.run_on_scheduler(time.process_time)
    return seconds


@contextmanager
def peak_memory(client: Client) -> Iterator[Callable[[], int]]:
    """Watch the scheduler process's resident memory; gives a function of the peak.

    The peak is in bytes, up to when it is asked.
    """
    process = psutil.Process(client.run_on_scheduler(os.getpid))
    peak = process.memory_info().rss
    ended = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(_SAMPLE_SECONDS):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=sample, name="peak-memory", daemon=True)
    thread.start()
    try:
        yield lambda: peak
    finally:
        ended.set()
        thread.join()


def _count_tasks(dask_scheduler: object) -> int:
    return len(dask_scheduler.tasks)  # type: ignore[attr-defined]
