"""Very many deployments, updates and undeployments: nothing of them is kept.

    python -m tests.soak.cycles [--count 1000]

Run it from the repository's folder. A scheduler and two workers are processes of their
own. Each cycle deploys a model of 0.5 MB, asks it, updates it twice, asks it again, and
undeploys it. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import os

# Of this process and of all that it starts; set before torch and Dask are imported.
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import gc
import sys
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
from distributed import Client

import daskinfer
from benchmarks.measure import cluster, settle
from tests.soak.report import Report, throughput

#: Requests to measure what one costs.
PORTION = 1_000

ROW = np.ones((1, 256), np.float32)


def run(count: int) -> Report:
    """Go through so many cycles."""
    with cluster(2) as client:
        scheduler = psutil.Process(client.run_on_scheduler(os.getpid))
        workers = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
        before = _throughput(client)
        of_scheduler, of_workers = [], []
        started = perf_counter()
        for _ in range(10):
            for number in range(count // 10):
                _cycle(client, number)
            settle(client)
            of_scheduler.append(scheduler.memory_info().rss)
            of_workers.append(sum(worker.memory_info().rss for worker in workers))
        seconds = perf_counter() - started
        left = client.run_on_scheduler(_tables)
        after = _throughput(client)
    return Report(
        f"{count:,} cycles of deploy, two updates, undeploy",
        {"the scheduler": of_scheduler, "the workers": of_workers},
        before,
        after,
        seconds,
        left,
    )


def _net(number: int) -> torch.nn.Module:
    net = torch.nn.Linear(256, 512)
    torch.nn.init.constant_(net.bias, float(number))
    return net


def _cycle(client: Client, number: int) -> None:
    model = daskinfer.deploy(client, _net(0), name="m")
    daskinfer.gather(model.map([ROW] * 4))
    for version in (2, 3):
        model.update(_net(number + version), version=str(version))
        future = model.submit(ROW)
        future.result()
        assert daskinfer.info(future).version == str(version)
    model.undeploy()


def _tables(dask_scheduler: Any) -> dict[str, int]:
    plugin = dask_scheduler.plugins["daskinfer"]
    return {
        "deployments": len(plugin.registry.deployments),
        "lines": len(plugin.dispatcher.lines),
        "statistics": len(plugin.dispatcher.statistics),
        "routes": len(plugin.routing.edition.routes),
        "requests": len(plugin.requests),
        "unloading": len(plugin.unloading),
    }


def _throughput(client: Client) -> float:
    model = daskinfer.deploy(client, _net(0), name="measured", warmup=ROW)
    measured = throughput(client, model, ROW, PORTION)
    model.undeploy()
    gc.collect()
    return measured


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.cycles")
    parser.add_argument("--count", type=int, default=1_000)
    report = run(parser.parse_args().count)
    print(report)
    return int(not report.is_good)


if __name__ == "__main__":
    sys.exit(main())
