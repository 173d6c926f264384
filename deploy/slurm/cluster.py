#!/usr/bin/env python
"""Start a cluster on Slurm, with one `dask infer worker` in each job.

Not tried: no Slurm has run these jobs. The tests check the job script that
dask-jobqueue makes of this, and have `dask infer worker` read the command in it.

    pip install dask-jobqueue
    python deploy/slurm/cluster.py --dry-run              # shows the job script
    python deploy/slurm/cluster.py --jobs 4               # until Ctrl-C
    python deploy/slurm/cluster.py --jobs 4 --gres npu:8 --devices 8 --device npu

Run it where jobs may be submitted, on a host that the nodes reach: the scheduler runs
here. daskinfer must be installed at the same path on the nodes. With Ascend NPUs, name
CANN's environment: --prologue "source /usr/local/Ascend/ascend-toolkit/set_env.sh".

Each worker process takes one of the devices that are visible in its job. Slurm sets
CUDA_VISIBLE_DEVICES to a job's GPUs. Where it does not set ASCEND_RT_VISIBLE_DEVICES
to a job's NPUs, take whole nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from typing import Any


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Start a cluster on Slurm.")
    add = parser.add_argument
    add("--jobs", type=int, default=1, help="how many jobs, each on one node")
    add("--device", default="cpu", help="npu, cuda or cpu")
    add("--devices", type=int, default=1, help="of a job, each with a worker process")
    add("--gres", help="what Slurm calls them, such as npu:8 or gpu:4")
    add("--cores", type=int, default=8, help="of a job")
    add("--memory", default="32 GiB", help="of a job")
    add("--walltime", default="08:00:00")
    add("--partition")
    add("--account")
    add("--interface", help="network of the nodes, such as ib0")
    add(
        "--prologue",
        action="append",
        default=[],
        help="command before the worker",
    )
    add("--scheduler-file", default="scheduler.json", help="by which clients find it")
    add("--dry-run", action="store_true", help="print the job script")
    return parser.parse_args(arguments)


def job_options(given: argparse.Namespace) -> dict[str, Any]:
    """What `SLURMCluster` is to be told of the jobs."""
    return {
        "cores": given.cores,
        "memory": given.memory,
        # dask-jobqueue waits for so many workers of a job: NAME-0, NAME-1, ...
        "processes": given.devices,
        "worker_command": "daskinfer.cli.worker",
        "worker_extra_args": [
            *("--device", given.device),
            *("--nworkers", str(given.devices)),
        ],
        "job_script_prologue": list(given.prologue),
        "job_extra_directives": [f"--gres={given.gres}"] if given.gres else [],
        "walltime": given.walltime,
        "queue": given.partition,
        "account": given.account,
        "interface": given.interface,
    }


def main() -> None:
    """Start the cluster, or show how a job would be started."""
    given = parse()
    if given.dry_run:
        from dask_jobqueue.slurm import SLURMJob

        print(SLURMJob("tcp://SCHEDULER", "NAME", **job_options(given)).job_script())
        return
    from dask_jobqueue import SLURMCluster
    from distributed import Client

    # The plugin is there from the beginning, so that /inference/ready answers.
    scheduler = {"preload": ["scheduler_plugins"]}
    cluster = SLURMCluster(scheduler_options=scheduler, **job_options(given))
    with cluster, Client(cluster) as client:
        client.write_scheduler_file(given.scheduler_file)
        cluster.scale(jobs=given.jobs)
        print(f"{given.jobs} jobs; {given.scheduler_file} says where the scheduler is")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
