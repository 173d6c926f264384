"""What was measured, against what was promised."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

# A quick run says little about speed, but a miss by this factor says something.
_GROSS = 4.0


@dataclass(frozen=True)
class Ratio:
    """A ratio of two measurements of one run, and its bar.

    Parameters
    ----------
    name
        What was compared.
    measured
        The ratio.
    required
        The bar: the least that is good enough, or with ``at_most`` the most.
    at_most
        Whether smaller is better.
    detail
        The two measurements themselves, with their units.

    Examples
    --------
    >>> Ratio("ours against theirs", 9.0, 8.0).ok
    True
    >>> Ratio("our latency against theirs", 0.4, 0.35, at_most=True).ok
    False
    """

    name: str
    measured: float
    required: float
    at_most: bool = False
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the bar is held."""
        return self._holds(1.0)

    @property
    def grossly_missed(self) -> bool:
        """Whether the bar is missed by a factor of four."""
        return not self._holds(_GROSS)

    def _holds(self, slack: float) -> bool:
        if self.at_most:
            return self.measured <= self.required * slack
        return self.measured >= self.required / slack

    @property
    def bar(self) -> str:
        """The bar in words.

        >>> Ratio("a against b", 1.0, 0.85).bar
        'at least 0.85'
        """
        return f"{'at most' if self.at_most else 'at least'} {self.required:g}"


@dataclass(frozen=True)
class Machine:
    """Where the numbers come from."""

    cpu: str
    cores: int
    system: str
    python: str
    torch: str
    distributed: str
    daskinfer: str

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine and its Python environment."""
        return cls(
            _cpu_name(),
            psutil.cpu_count() or 1,
            f"{platform.system()} {platform.release()}",
            platform.python_version(),
            version("torch"),
            version("distributed"),
            version("daskinfer"),
        )

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.system}; Python {self.python}, "
            f"torch {self.torch}, distributed {self.distributed}, "
            f"daskinfer {self.daskinfer}"
        )


def show(
    console: Console, machine: Machine, title: str, ratios: Sequence[Ratio], judge: bool
) -> None:
    """Print a benchmark's ratios; whether the bars are held, if `judge`."""
    table = Table(title=title, caption=str(machine), title_justify="left")
    table.add_column("ratio", overflow="fold")
    table.add_column("measured", justify="right")
    table.add_column("required", no_wrap=True)
    table.add_column("of", overflow="fold")
    table.add_column("")
    for ratio in ratios:
        verdict = ("held" if ratio.ok else "MISSED") if judge else ""
        table.add_row(
            ratio.name, f"{ratio.measured:.2f}", ratio.bar, ratio.detail, verdict
        )
    console.print(table)


def as_json(
    machine: Machine, results: dict[str, Sequence[Ratio]], smoke: bool
) -> dict[str, Any]:
    """Everything that :func:`show` prints, for other programs."""
    return {
        "machine": asdict(machine),
        "smoke": smoke,
        "benchmarks": {
            name: [{**asdict(ratio), "ok": ratio.ok} for ratio in ratios]
            for name, ratios in results.items()
        },
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, platform.machine())
