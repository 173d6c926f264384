"""When requests arrive: exact on every machine and Python version."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat

__all__ = ["Arrival", "Lcg", "bursts", "lumps", "once", "poisson", "ramp"]

#: Seconds, and the rows of each request that arrives then.
Arrival = tuple[float, tuple[int, ...]]


class Lcg:
    """Knuth's 64-bit linear congruential generator (MMIX)."""

    def __init__(self, seed: int) -> None:
        self._state = seed
        for _ in range(8):
            self.uniform()

    def uniform(self) -> float:
        """A number in [0, 1)."""
        self._state = (
            6364136223846793005 * self._state + 1442695040888963407
        ) & 0xFFFFFFFFFFFFFFFF
        return (self._state >> 11) / (1 << 53)

    def exponential(self, mean: float) -> float:
        """Seconds to the next event, to whole nanoseconds."""
        return round(-math.log(1 - self.uniform()) * mean, 9)

    def lognormal(self, spread: float) -> float:
        """A factor with mean 1 (Box and Muller, 1958)."""
        radius = math.sqrt(-2 * math.log(1 - self.uniform()))
        normal = radius * math.cos(2 * math.pi * self.uniform())
        return math.exp(spread * normal - spread * spread / 2)


def poisson(rate: float, count: int, seed: int = 1, rows: int = 1) -> Iterator[Arrival]:
    """`count` requests of `rows` rows, `rate` rows per second, independent."""
    random, now = Lcg(seed), 0.0
    for _ in range(count):
        now += random.exponential(rows / rate)
        yield now, (rows,)


def bursts(rate: float, count: int, seed: int = 1) -> Iterator[Arrival]:
    """Independent arrivals whose rate jumps between 0.36 and 2.5 times `rate`."""
    random, now, busy = Lcg(seed), 0.0, False
    until = random.exponential(0.28)
    while count:
        gap = random.exponential(1 / (rate * (2.5 if busy else 0.25 / 0.7)))
        if now + gap > until:
            busy, now = not busy, until
            until += random.exponential(0.12 if busy else 0.28)
            continue
        now += gap
        count -= 1
        yield now, (1,)


def ramp(capacity: float, count: int, seed: int = 1) -> Iterator[Arrival]:
    """Load that grows from a tenth of `capacity` to 1.05 times it."""
    random, now = Lcg(seed), 0.0
    for i in range(count):
        now += random.exponential(1 / (capacity * (0.1 + 0.95 * i / count)))
        yield now, (1,)


def lumps(rate: float, count: int, seed: int = 1, size: int = 32) -> Iterator[Arrival]:
    """Messages of `size` requests each."""
    random, now = Lcg(seed), 0.0
    for _ in range(count // size):
        now += random.exponential(size / rate)
        yield now, tuple(repeat(1, size))


def once(count: int) -> Iterator[Arrival]:
    """All in one message."""
    yield 0.0, tuple(repeat(1, count))
