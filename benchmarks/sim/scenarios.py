"""Runs of the simulator that the tests and the comparison share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.sim.arrivals import once, poisson
from benchmarks.sim.cluster import Cluster, Policy
from benchmarks.sim.curves import CURVES, Shape
from benchmarks.sim.policies import BentoML, Greedy, foresight, learned
from benchmarks.sim.records import Result
from scheduler_plugins.load import DeviceLoad

__all__ = ["POLICIES", "at_once", "closed", "cluster", "load"]

Maker = Callable[[Shape, Sequence[float]], Callable[[Sequence[DeviceLoad]], Policy]]

#: Makers of policies by name.
POLICIES: dict[str, Maker] = {
    "daskinfer": learned,
    "greedy": lambda shape, slowness: Greedy(shape.max_rows),
    "two in flight": lambda shape, slowness: Greedy(shape.max_rows, in_flight=2),
    "5 ms window": lambda shape, slowness: Greedy(shape.max_rows, window=0.005),
    "fixed size": lambda shape, slowness: Greedy(
        shape.max_rows, fixed=min(32, shape.max_rows // 2)
    ),
    "BentoML": lambda shape, slowness: BentoML(shape.max_rows),
    "foresight": foresight,
}


def cluster(
    shape: str, policy: str, slowness: Sequence[float] = (1.0,), **changes: Any
) -> Cluster:
    """A simulated cluster, by names; `changes` are keywords of `Cluster`."""
    curve = CURVES[shape]
    return Cluster(curve, POLICIES[policy](curve, slowness), slowness, **changes)


def load(
    shape: str,
    policy: str,
    share: float,
    slowness: Sequence[float] = (1.0,),
    *,
    count: int = 5000,
    seed: int = 1,
    **changes: Any,
) -> Result:
    """Independent requests of one row, at this share of what the devices can do."""
    rate = share * CURVES[shape].capacity(slowness)
    simulated = cluster(shape, policy, slowness, **changes)
    return simulated.run(poisson(rate, count, seed))


def at_once(
    shape: str,
    policy: str,
    count: int = 10_000,
    slowness: Sequence[float] = (1.0,),
    **changes: Any,
) -> Result:
    """All requests in one message."""
    return cluster(shape, policy, slowness, **changes).run(once(count))


def closed(
    shape: str,
    policy: str,
    callers: int,
    slowness: Sequence[float] = (1.0,),
    *,
    count: int = 3000,
    **changes: Any,
) -> Result:
    """Callers that ask again about a millisecond after each answer."""
    return cluster(shape, policy, slowness, **changes).run_closed(callers, count)
