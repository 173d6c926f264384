from __future__ import annotations

import math
import random
import statistics

import pytest

from daskinfer.timing.latency import LatencyModel

DEVICE_CLASS = "cpu"


def execution_seconds(rows: int) -> float:
    return 1e-4 + 2e-5 * rows


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("sigma", [0.05, 0.2, 0.4])
def test_noise_at_one_size_leaves_what_is_known_of_others(
    sigma: float, devices: int
) -> None:
    """Many noisy passes of one size, one in ten four times as long."""
    model = LatencyModel(64)
    names = [f"tcp://10.0.0.{i}:1" for i in range(devices)]
    for name in names:
        timings = [(n, execution_seconds(n)) for n in (1, 8, 64)]
        model.seed(name, DEVICE_CLASS, timings)
    ratios: dict[int, list[float]] = {1: [], 8: [], 64: []}
    generator = random.Random(1)
    for i in range(5000):
        seconds = execution_seconds(64) * math.exp(generator.gauss(0, sigma))
        if generator.random() < 0.1:
            seconds *= 4
        model.observe(names[i % devices], DEVICE_CLASS, 64, seconds)
        for rows, seen in ratios.items():
            predicted = model.seconds(names[0], DEVICE_CLASS, rows)
            seen.append(predicted / execution_seconds(rows))
    for seen in ratios.values():
        assert 0.5 < statistics.median(seen[-1000:]) < 2


def test_a_device_that_stays_slow_is_known_to_be() -> None:
    model = LatencyModel(64)
    for name in ("fast", "slow"):
        model.seed(name, DEVICE_CLASS, [(n, execution_seconds(n)) for n in (1, 64)])
    for _ in range(1000):
        model.observe("fast", DEVICE_CLASS, 64, execution_seconds(64))
        model.observe("slow", DEVICE_CLASS, 64, 10 * execution_seconds(64))
    fast = model.seconds("fast", DEVICE_CLASS, 64)
    slow = model.seconds("slow", DEVICE_CLASS, 64)
    assert fast == pytest.approx(execution_seconds(64), rel=0.1)
    assert slow == pytest.approx(10 * execution_seconds(64), rel=0.1)
