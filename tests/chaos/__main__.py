"""Let anything die at any time, and see that every request is answered once.

    python -m tests.chaos [--seeds 1 2 3] [--seconds 20] [--pace 2.5] [--short]

Run it from the repository's folder. Everything that happens is drawn from the seed; how
fast it happens is up to the machine. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import os

# Of this process and of all that it starts; set before torch and Dask are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DASK_DISTRIBUTED__SCHEDULER__VALIDATE"] = "True"
os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")

import argparse
import asyncio
import sys

import dask

from tests.chaos.plan import PACE, Plan
from tests.chaos.run import run


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="how long each seed's plan is"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=PACE,
        help="seconds between two events; a process takes about as long to start",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="give each worker room for two models of those that there are",
    )
    options = parser.parse_args()
    if options.short:
        # What counts of a factory that makes no module is what travels of it.
        dask.config.set({"daskinfer.weights.host": "200 B"})
    about = options.seconds, options.pace, options.short
    plans = [Plan.of(seed, *about) for seed in options.seeds]
    return int(not all([asyncio.run(run(plan)) for plan in plans]))


if __name__ == "__main__":
    sys.exit(main())
