"""Over many scenarios, learning costs little against knowing the true times."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest

from benchmarks.sim.arrivals import bursts, lumps, once, poisson, ramp
from benchmarks.sim.curves import CURVES
from benchmarks.sim.records import Result
from benchmarks.sim.scenarios import cluster

SHAPES = ("steep", "flat", "knee", "sizes", "cpu")
COUNT = 4000


def cost(shape: str, policy: str, devices: int, scenario: str, seed: int) -> float:
    """Seconds: mean latency, or per answer where the devices are never idle."""
    equal = (1.0,) * devices
    simulated = cluster(shape, policy, equal, noise=0.05, jitter=1 / 3, seed=seed)
    rate = CURVES[shape].capacity(equal)
    if scenario == "callers":
        return 1 / simulated.run_closed(32 * devices, 3000).throughput()
    arrivals = {
        "quiet": lambda: poisson(0.1 * rate, COUNT, seed),
        "usual": lambda: poisson(0.6 * rate, COUNT, seed),
        "busy": lambda: poisson(0.9 * rate, COUNT, seed),
        "overload": lambda: poisson(1.2 * rate, COUNT, seed),
        "bursts": lambda: bursts(0.6 * rate, COUNT, seed),
        "ramp": lambda: ramp(rate, COUNT, seed),
        "lumps": lambda: lumps(0.5 * rate, COUNT, seed),
        "once": lambda: once(COUNT),
    }[scenario]()
    result = simulated.run(arrivals)
    assert result.unanswered == 0
    measure: Callable[[Result], float] = {
        "overload": lambda result: 1 / result.throughput(),
        "once": lambda result: result.makespan,
    }.get(scenario, lambda result: result.mean())
    return measure(result)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_learned_rule_against_foresight(seed: int) -> None:
    ratios = {
        (shape, devices, scenario): cost(shape, "daskinfer", devices, scenario, seed)
        / cost(shape, "foresight", devices, scenario, seed)
        for shape in SHAPES
        for devices in (1, 4)
        for scenario in (
            "quiet usual busy overload bursts ramp lumps once callers".split()
        )
    }
    within = sum(ratio <= 1.05 for ratio in ratios.values()) / len(ratios)
    worst = max(ratios, key=lambda key: ratios[key])
    assert median(ratios.values()) <= 1.01
    assert within >= 0.88
    assert ratios[worst] <= 1.6, worst
