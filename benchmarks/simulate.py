"""Compare batching policies in a simulated cluster.

    python benchmarks/simulate.py [--plot FILE.png] [--requests N] [--seed N]

The policy of daskinfer is the real code of ``scheduler_plugins``, on a virtual clock;
the arrivals are exact, so two runs print the same on any machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sim.arrivals import bursts, lumps
from benchmarks.sim.curves import CURVES
from benchmarks.sim.scenarios import POLICIES, at_once, closed, cluster, load

COMPARED = [name for name in POLICIES if name != "foresight"]
SHAPES = ("steep", "flat", "knee", "sizes", "cpu")
TITLES = {
    "steep": "steep: 20 ms + 0.5 ms a row, up to 64 rows",
    "flat": "flat: 2 ms + 1 ms a row, up to 64 rows",
    "knee": "knee: 8 ms up to 32 rows, 0.25 ms a row beyond, up to 256",
    "sizes": "sizes: padded to 1, 2, 4, 8, 16, 32 rows; 3.5 ms + 0.5 ms a row",
    "cpu": "cpu: a CNN on one core, as measured; not monotone, up to 512 rows",
}


@dataclass(frozen=True)
class Row:
    """One line of the table: what each policy reached."""

    scenario: str
    unit: str
    values: dict[str, float]
    larger_is_better: bool = False

    @property
    def best(self) -> str:
        choose = max if self.larger_is_better else min
        return choose(self.values, key=lambda name: self.values[name])


def _row(scenario: str, unit: str, measure: Callable[[str], float], up: bool) -> Row:
    return Row(scenario, unit, {name: measure(name) for name in COMPARED}, up)


def rows(shape: str, devices: int, requests: int, seed: int) -> list[Row]:
    """All scenarios of one shape on so many equal devices."""
    equal = (1.0,) * devices
    rate = CURVES[shape].capacity(equal)

    def arriving(share: float) -> Callable[[str], float]:
        return lambda name: (
            1e3 * (load(shape, name, share, equal, count=requests, seed=seed).mean())
        )

    def burst(name: str) -> float:
        arrivals = bursts(0.6 * rate, requests, seed)
        return 1e3 * cluster(shape, name, equal).run(arrivals).mean()

    def lump(name: str) -> float:
        arrivals = lumps(0.5 * rate, requests, seed)
        return 1e3 * cluster(shape, name, equal).run(arrivals).mean()

    def backlog(name: str) -> float:
        return 1e3 * at_once(shape, name, 2 * requests, equal).makespan

    def callers(name: str) -> float:
        return closed(
            shape, name, 32 * devices, equal, count=requests, seed=seed
        ).throughput()

    table = [
        _row(f"load {share:.0%}, mean latency", "ms", arriving(share), False)
        for share in (0.1, 0.3, 0.6, 0.8, 0.95)
    ]
    table += [
        _row("bursts, load 60%, mean latency", "ms", burst, False),
        _row("messages of 32, load 50%, mean latency", "ms", lump, False),
        _row(f"{2 * requests} at once, until done", "ms", backlog, False),
        _row(f"{32 * devices} callers, answers", "1/s", callers, True),
    ]
    return table


def show(title: str, table: list[Row]) -> None:
    """Print one table; the best of each line is marked."""
    print(f"\n{title}")
    print(f"{'':44s}" + "".join(f"{name:>15s}" for name in COMPARED))
    for row in table:
        cells = (
            f"{value:.1f}{'*' if name == row.best else ' '}"
            for name, value in row.values.items()
        )
        label = f"{row.scenario} [{row.unit}]"
        print(f"{label:44s}" + "".join(f"{cell:>15s}" for cell in cells), flush=True)


def plot(path: str, requests: int, seed: int) -> None:
    """Draw mean latency against load for each shape on four devices."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "--plot needs matplotlib, which is in the extra 'dev': "
            "pip install 'daskinfer[dev]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    figure, axes = pyplot.subplots(1, len(SHAPES), figsize=(4 * len(SHAPES), 4))
    for axis, shape in zip(axes, SHAPES, strict=True):
        for name in COMPARED:
            means = [
                load(shape, name, share, (1.0,) * 4, count=requests, seed=seed).mean()
                for share in shares
            ]
            axis.plot(shares, [1e3 * mean for mean in means], label=name)
        axis.set(title=shape, xlabel="load", yscale="log")
    axes[0].set_ylabel("mean latency [ms], 4 devices")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    print(f"\nplotted to {path}")


def main(arguments: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(
        description="Compare batching policies in a simulated cluster."
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args(arguments)
    ratios: list[float] = []
    for shape in options.shapes:
        for devices in (1, 4):
            table = rows(shape, devices, options.requests, options.seed)
            show(f"{TITLES[shape]}; {devices} device(s)", table)
            for row in table:
                ours, greedy = row.values["daskinfer"], row.values["greedy"]
                ratios.append(
                    greedy / ours if not row.larger_is_better else ours / greedy
                )
    ratios.sort()
    print(
        "\n* best of the line. 3 ms to a worker, 2 ms back. Greedy is worse than "
        f"daskinfer by a factor of {ratios[len(ratios) // 2]:.2f} (median), "
        f"{ratios[0]:.2f} (least), {ratios[-1]:.1f} (most)."
    )
    if options.plot:
        plot(options.plot, options.requests, options.seed)


if __name__ == "__main__":
    main()
