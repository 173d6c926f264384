"""What it takes until weights are where they are needed.

Fetching is measured with senders that are throttled, as by a network that is slower
than the memory of this host, and with a directory for each worker, as if each were on
a host of its own. Seconds are those that the workers report: from when they were told
to load a version until it was ready.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask
import numpy as np
import numpy.typing as npt
import psutil
import torch
from distributed import Client

import daskinfer
from benchmarks.measure import cluster, wait_for
from benchmarks.report import Ratio
from daskinfer.installation import install

TITLE = "Weights on their way, on disk and in memory"

#: Bytes a second that each process sends.
BANDWIDTH = 50_000_000
WORKERS = 4
WIDTH = 2048
#: Layers of 16.8 MB.
FETCHED = 15
LOADED = 30

X: npt.NDArray[np.float32] = np.ones((1, WIDTH), np.float32)


def run(smoke: bool = False) -> list[Ratio]:
    """Fetch on one worker and on several; start cold and warm; weigh two workers."""
    fetched, loaded = (6, 6) if smoke else (FETCHED, LOADED)
    return [*_fetching(fetched), _starting(loaded), _sharing(loaded)]


class Layers(torch.nn.Module):
    """Dense layers, (n, 2048) to the same."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all of them."""
        result: torch.Tensor = self.layers(x)
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.parameters())


def _fetching(layers: int) -> list[Ratio]:
    seconds, sent, net = {}, {}, Layers(layers)
    for workers in (1, WORKERS):
        with TemporaryDirectory() as folder, cluster(workers) as client:
            client.run(_separate, folder)
            client.run_on_scheduler(_throttle)
            client.sync(install, client)
            daskinfer.deploy(client, net, name="net")
            seconds[workers] = max(client.run_on_scheduler(_load_seconds))
            sent[workers] = client.run_on_scheduler(_sent)
    size = f"{net.nbytes / 1e6:.0f} MB, senders at {BANDWIDTH / 1e6:.0f} MB/s"
    return [
        Ratio(
            f"time to fetch weights on {WORKERS} workers, of that on one",
            seconds[WORKERS] / seconds[1],
            1.5,
            at_most=True,
            detail=f"{seconds[WORKERS]:.2f} s against {seconds[1]:.2f} s, {size}",
        ),
        Ratio(
            "how often the scheduler sends a chunk",
            max(sent[WORKERS]),
            2.0,
            at_most=True,
            detail=f"{sum(sent[WORKERS])} sent of {len(sent[WORKERS])} chunks "
            f"to {WORKERS} workers",
        ),
    ]


def _starting(layers: int) -> Ratio:
    net = Layers(layers)
    with _directory(), cluster(1, nannies=True) as client:
        model = daskinfer.deploy(client, net, name="net")
        (cold,) = client.run_on_scheduler(_load_seconds)
        gone = set(client.scheduler_info()["workers"])
        client.restart()
        wait_for(lambda: bool(_ready(client) - gone))
        (warm,) = client.run_on_scheduler(_load_seconds)
        model.submit(X).result()
    return Ratio(
        "time to load in a process that starts again, of that of the first",
        warm / cold,
        1.0,
        at_most=True,
        detail=f"{warm:.2f} s against {cold:.2f} s, {net.nbytes / 1e6:.0f} MB",
    )


def _sharing(layers: int) -> Ratio:
    net = Layers(layers)
    with _directory(), cluster(2) as client:
        small = daskinfer.deploy(client, Layers(1), name="small")
        _ask_all(client, small)
        processes = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
        before = _proportional(processes)
        model = daskinfer.deploy(client, net, name="net")
        _ask_all(client, model)
        grown = _proportional(processes) - before
    return Ratio(
        "memory of two workers with the same weights, of the weights",
        grown / net.nbytes,
        1.2,
        at_most=True,
        detail=f"{grown / 1e6:.0f} MB (proportional set size) for "
        f"{net.nbytes / 1e6:.0f} MB",
    )


@contextmanager
def _directory() -> Iterator[None]:
    """Let processes that are started meanwhile share a fresh directory."""
    name = "DASK_DASKINFER__ARTIFACTS__DIRECTORY"
    before = os.environ.get(name)
    with TemporaryDirectory() as folder:
        os.environ[name] = str(Path(folder, "store"))
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _separate(folder: str, dask_worker: Any) -> None:
    name = dask_worker.address.rpartition(":")[2]
    dask.config.set({"daskinfer.artifacts.directory": str(Path(folder, name))})
    _throttle()


def _throttle() -> None:
    dask.config.set({"daskinfer.artifacts.send-bandwidth": BANDWIDTH})


def _ask_all(client: Client, model: daskinfer.Model) -> None:
    for address in client.scheduler_info()["workers"]:
        model.options(workers=[address]).submit(X).result()


def _proportional(processes: list[psutil.Process]) -> int:
    return sum(process.memory_full_info().pss for process in processes)


def _ready(client: Client) -> set[str]:
    found: set[str] = client.run_on_scheduler(_ready_workers)
    return found


def _ready_workers(dask_scheduler: Any) -> set[str]:
    version = dask_scheduler.plugins["daskinfer"].registry.version("net")
    return {replica.address for replica in version.ready()}


def _load_seconds(dask_scheduler: Any) -> list[float]:
    version = dask_scheduler.plugins["daskinfer"].registry.version("net")
    return [replica.seconds for replica in version.ready()]


def _sent(dask_scheduler: Any) -> list[int]:
    entries = dask_scheduler.plugins["daskinfer"].distribution.entries.values()
    (found,) = (entry.swarm.sent for entry in entries)
    return list(found)
