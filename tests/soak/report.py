"""What a long run has shown, and whether that is good."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from distributed import Client

import daskinfer
from benchmarks.measure import settle

#: How often the throughput is measured.
ROUNDS = 5


@dataclass(frozen=True)
class Report:
    """What was measured.

    Attributes
    ----------
    what
        What was done, and how often.
    memory
        Resident bytes after each tenth of that, by whose they are.
    before, after
        Answers per second before that, and after it.
    seconds
        What it took.
    left
        Sizes of tables that should be empty at the end.
    """

    what: str
    memory: Mapping[str, Sequence[int]]
    before: float
    after: float
    seconds: float
    left: Mapping[str, int] = field(default_factory=dict)

    @property
    def growth(self) -> dict[str, float]:
        """Memory after the last three tenths, against that after the first three.

        A single measurement is up to a tenth off: memory is given back when it pleases
        the allocator.
        """
        return {
            who: statistics.mean(sizes[-3:]) / statistics.mean(sizes[:3])
            for who, sizes in self.memory.items()
        }

    @property
    def throughput(self) -> float:
        """Throughput afterwards, against that before."""
        return self.after / self.before

    @property
    def is_good(self) -> bool:
        """Whether memory stayed flat, nothing is left, and all is as fast as before."""
        flat = max(self.growth.values()) <= 1.1
        return flat and self.throughput >= 0.9 and not any(self.left.values())

    def __str__(self) -> str:
        lines = [f"{self.what} in {self.seconds:.0f} s"]
        for who, sizes in self.memory.items():
            told = " ".join(f"{size / 2**20:.0f}" for size in sizes)
            lines.append(
                f"memory of {who} after each tenth, MiB: {told}; the last three "
                f"against the first {self.growth[who]:.3f}"
            )
        lines.append(
            f"throughput after against before: {self.throughput:.2f} "
            f"({self.after:,.0f}/s of {self.before:,.0f}/s)"
        )
        if self.left:
            lines.append(f"left in the plugin's tables: {dict(self.left)}")
        return "\n".join(lines)


def throughput(
    client: Client, model: daskinfer.Model, row: np.ndarray, count: int
) -> float:
    """Answers per second, the median of several rounds of so many requests."""
    rates = []
    for _ in range(ROUNDS + 1):
        started = perf_counter()
        futures = model.map([row] * count)
        assert len(daskinfer.gather(futures)) == count
        rates.append(count / (perf_counter() - started))
        del futures
        settle(client)
    return statistics.median(rates[1:])
