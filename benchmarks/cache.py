"""What a hit costs in each tier of a cache, against computing the answer again.

One process, one thread: a network's answer is put, found in each tier in turn, and
computed. A hit in a tier leaves the entry there, so that each is measured alone. And
what a cache costs whose look-ups all miss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from dask.utils import format_bytes

from benchmarks.measure import alternate, medians
from benchmarks.report import Ratio
from daskinfer.cache import CacheKey, TieredCache, TierPolicy

TITLE = "A hit in each tier of a cache, against the forward pass that it saves"

TIERS = ("host", "packed", "disk")
#: The bars: what a hit may take of the time that a miss takes.
REQUIRED = {"host": 0.05, "packed": 0.1, "disk": 0.2}
MISS = 0.1
#: One request of one row, whose answer is as large as it is.
NETWORK, SHAPE = "benchmarks.models:transformer", (1, 64, 128)


def run(smoke: bool = False) -> list[Ratio]:
    """Compare hits of each tier, and misses, with the network."""
    rounds, calls = (1, 5) if smoke else (7, 200)
    module, _, function = NETWORK.partition(":")
    net = getattr(importlib.import_module(module), function)().eval()
    x = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory() as folder, torch.inference_mode():
        cache = TieredCache(
            folder, tiers=dict.fromkeys(TIERS, TierPolicy("64 MiB", "1h"))
        )
        answer = net(x)
        keys = {tier: CacheKey.of("answer", tier) for tier in TIERS}
        for tier, key in keys.items():
            assert cache.put(key, answer, tier=tier) == tier
        absent = CacheKey.of("another")

        def hit(tier: str) -> Callable[[], Any]:
            return lambda: cache.get(keys[tier], tiers=(tier,))

        ways: dict[str, Callable[[], float]] = {
            tier: _timed(hit(tier), calls) for tier in TIERS
        }
        ways["compute"] = _timed(lambda: net(x), max(calls // 10, 3))
        ways["miss"] = _timed(lambda: cache.get(absent), calls)
        seconds = medians(alternate(ways, rounds))
        statistics = cache.stats()
        assert all(statistics[tier].hits >= calls for tier in TIERS)
    compute = seconds["compute"]
    bars = {f"hit in {tier}": (seconds[tier], REQUIRED[tier]) for tier in TIERS}
    bars["miss in all tiers"] = (seconds["miss"], MISS)
    size = format_bytes(answer.nbytes)
    return [
        Ratio(
            f"{name} ({size}), against computing",
            measured / compute,
            required,
            at_most=True,
            detail=f"{1e6 * measured:.1f} µs of {1e6 * compute:.0f} µs",
        )
        for name, (measured, required) in bars.items()
    ]


def _timed(call: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Return a function that gives the mean seconds of a call."""

    def measure() -> float:
        started = perf_counter()
        for _ in range(calls):
            call()
        return (perf_counter() - started) / calls

    return measure
