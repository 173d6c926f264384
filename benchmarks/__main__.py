"""Run the benchmarks and compare with what is promised.

    python -m benchmarks [throughput predict imap batch_size queue_depth slow_workers
                          faults overload cache zipf switching streaming continuous
                          artifacts] [--smoke] [--json FILE]

Run it from the repository's folder, on an idle machine. The exit status is 1 if a bar
is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# Of this process and of all that it starts; set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console

from benchmarks.report import Machine, Ratio, as_json, show

NAMES = (
    "throughput",
    "predict",
    "imap",
    "batch_size",
    "queue_depth",
    "slow_workers",
    "faults",
    "overload",
    "cache",
    "zipf",
    "switching",
    "streaming",
    "continuous",
    "artifacts",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure daskinfer against what is promised of it.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a fraction of the work: shows that everything runs; only a miss by a "
        "factor of four counts",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write to FILE")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")

    console, machine = Console(), Machine.here()
    results: dict[str, Sequence[Ratio]] = {}
    for name in options.names or NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        with console.status(f"{name} ..."):
            results[name] = module.run(options.smoke)
        show(console, machine, module.TITLE, results[name], judge=not options.smoke)
    if options.json is not None:
        report = as_json(machine, results, options.smoke)
        options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    missed = [
        ratio
        for ratios in results.values()
        for ratio in ratios
        if (ratio.grossly_missed if options.smoke else not ratio.ok)
    ]
    for ratio in missed:
        console.print(f"missed: {ratio.name}: {ratio.measured:.2f}, {ratio.bar}")
    return int(bool(missed))


if __name__ == "__main__":
    # A run that is stopped takes its clusters with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
