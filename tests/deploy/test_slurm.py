"""The script for Slurm: the jobs that dask-jobqueue makes of it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.commands import check_command

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "cluster.py"


def dry_run(*arguments: str) -> list[str]:
    """The lines of the job script."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if line]


def worker_options(lines: list[str]) -> dict[str, object]:
    """The worker's command in a job script, as `dask infer worker` reads it."""
    python, minus_m, module, *rest = shlex.split(lines[-1])
    assert (python, minus_m, module) == (sys.executable, "-m", "daskinfer.cli.worker")
    return check_command(["dask", "infer", "worker", *rest])


def test_says_what_was_not_tried():
    assert "\nNot tried: " in SCRIPT.read_text()


def test_a_job_with_eight_npus():
    lines = dry_run(
        *("--device", "npu", "--devices", "8", "--gres", "npu:8"),
        *("--cores", "64", "--memory", "256 GiB", "--partition", "ascend"),
        *("--prologue", "source /opt/set_env.sh", "--walltime", "01:00:00"),
    )
    assert "#SBATCH --gres=npu:8" in lines
    assert "#SBATCH -p ascend" in lines
    assert "#SBATCH -t 01:00:00" in lines
    assert lines[-2] == "source /opt/set_env.sh"
    options = worker_options(lines)
    assert options["scheduler"] == "tcp://SCHEDULER"
    assert options["device"] == "npu" and options["n_workers"] == "8"
    assert options["nthreads"] == 8 and options["memory_limit"] == "32.00GiB"
    assert options["name"] == "NAME"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_job_with_one_worker(device):
    options = worker_options(dry_run("--device", device))
    assert options["device"] == device and options["n_workers"] == "1"
