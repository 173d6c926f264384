"""What the learned rule must reach, in scenarios that are exact on any machine."""

from __future__ import annotations

from collections import Counter
from functools import cache
from statistics import mean

import pytest

from benchmarks.sim.arrivals import poisson
from benchmarks.sim.curves import CURVES
from benchmarks.sim.records import Result
from benchmarks.sim.scenarios import at_once, closed, cluster, load

EQUAL = {1: (1.0,), 2: (1.0,) * 2, 4: (1.0,) * 4}


@cache
def loaded(shape: str, policy: str, share: float, devices: int) -> Result:
    return load(shape, policy, share, EQUAL[devices])


@pytest.mark.parametrize("shape", ["steep", "flat", "tiny", "knee", "sizes", "cpu"])
@pytest.mark.parametrize("devices", [1, 4])
def test_lone_request_takes_its_time_and_one_round_trip(
    shape: str, devices: int
) -> None:
    result = at_once(shape, "daskinfer", 1, EQUAL[devices])
    assert result.latencies == pytest.approx([CURVES[shape].at(1) + 0.005])


@pytest.mark.parametrize(
    ("shape", "devices", "share", "at_most"),
    [
        ("steep", 1, 0.1, 1.0),
        ("steep", 1, 0.8, 1.0),
        ("steep", 1, 0.95, 1.0),
        ("steep", 4, 0.3, 0.87),
        ("steep", 4, 0.8, 0.87),
        ("flat", 1, 0.8, 0.6),
        ("flat", 4, 0.8, 0.6),
        ("knee", 1, 0.8, 0.6),
        ("knee", 4, 0.8, 0.45),
        ("sizes", 1, 0.8, 0.55),
        ("sizes", 4, 0.8, 0.7),
        ("cpu", 1, 0.8, 0.8),
        ("cpu", 4, 0.8, 0.35),
    ],
)
def test_mean_latency_against_greedy(
    shape: str, devices: int, share: float, at_most: float
) -> None:
    ours = loaded(shape, "daskinfer", share, devices)
    greedy = loaded(shape, "greedy", share, devices)
    assert ours.mean() <= at_most * greedy.mean()


@pytest.mark.parametrize("shape", ["sizes", "cpu"])
def test_near_saturation_the_queue_stays_short(shape: str) -> None:
    assert loaded(shape, "daskinfer", 0.95, 1).mean() <= 0.060


@pytest.mark.parametrize("shape", ["steep", "knee", "sizes", "cpu"])
@pytest.mark.parametrize("devices", [1, 4])
def test_ten_thousand_at_once(shape: str, devices: int) -> None:
    ideal = 10_000 / CURVES[shape].capacity(EQUAL[devices])
    result = at_once(shape, "daskinfer", 10_000, EQUAL[devices])
    assert len(result.answered) == 10_000
    assert result.makespan <= 1.05 * ideal


@pytest.mark.parametrize(
    ("shape", "devices", "callers"),
    [
        ("knee", 1, 4),
        ("knee", 1, 32),
        ("steep", 4, 32),
        ("sizes", 4, 128),
    ],
)
def test_throughput_of_callers_that_wait(
    shape: str, devices: int, callers: int
) -> None:
    # How the callers happen to group themselves at first lasts; hence several starts.
    ours, greedy = (
        mean(
            closed(shape, policy, callers, EQUAL[devices], seed=seed).throughput()
            for seed in range(1, 7)
        )
        for policy in ("daskinfer", "greedy")
    )
    assert ours >= 1.2 * greedy


@pytest.mark.parametrize(
    ("slowness", "share", "at_most"),
    [
        ((1.0, 10.0), 0.5, 0.4),
        ((1.0, 1.0, 1.0, 10.0), 0.85, 0.25),
        ((1.0, 1.0, 3.0, 3.0), 0.15, 0.5),
    ],
)
def test_slow_devices_do_not_make_the_tail(
    slowness: tuple[float, ...], share: float, at_most: float
) -> None:
    ours = load("steep", "daskinfer", share, slowness)
    greedy = load("steep", "greedy", share, slowness)
    assert ours.percentile(99) <= at_most * greedy.percentile(99)


@pytest.mark.parametrize("shape", ["steep", "flat", "knee", "sizes", "cpu"])
def test_two_slow_devices_of_four_are_as_if_they_were_not_there(shape: str) -> None:
    mixed = (1.0, 1.0, 10.0, 10.0)
    half = 0.5 * CURVES[shape].capacity(mixed)
    ours = load(shape, "daskinfer", 0.5, mixed)
    fast_alone = cluster(shape, "daskinfer", EQUAL[2]).run(poisson(half, 5000))
    assert ours.percentile(99) <= 1.5 * fast_alone.percentile(99)
    rows = Counter[str]()
    for batch in ours.batches:
        rows[batch.device.load.name] += batch.rows
    slowest_fast = min(rows["device-0"], rows["device-1"])
    assert max(rows["device-2"], rows["device-3"]) <= slowest_fast / 10


def halfway(shape: str, share: float, devices: int) -> float:
    return 2500 / (share * CURVES[shape].capacity(EQUAL[devices]))


@pytest.mark.parametrize("shape", ["steep", "cpu"])
def test_drift_is_followed(shape: str) -> None:
    middle = halfway(shape, 0.5, 2)

    def change(device: int, now: float) -> float:
        return 1.5 if now >= middle else 1.0

    ours = load(shape, "daskinfer", 0.5, EQUAL[2], change=change)
    knowing = load(shape, "foresight", 0.5, EQUAL[2], change=change)
    assert ours.mean(0.5) <= 1.1 * knowing.mean(0.5)


@pytest.mark.parametrize(("shape", "at_most"), [("steep", 0.8), ("knee", 0.5)])
def test_a_device_that_turns_slow_is_avoided(shape: str, at_most: float) -> None:
    middle = halfway(shape, 0.5, 4)

    def change(device: int, now: float) -> float:
        return 10.0 if device == 0 and now >= middle else 1.0

    ours = load(shape, "daskinfer", 0.5, EQUAL[4], change=change)
    greedy = load(shape, "greedy", 0.5, EQUAL[4], change=change)
    knowing = load(shape, "foresight", 0.5, EQUAL[4], change=change)
    assert ours.mean(0.5) <= at_most * greedy.mean(0.5)
    assert ours.mean(0.5) <= 1.25 * knowing.mean(0.5)


def test_out_of_memory_is_a_measurement() -> None:
    result = at_once("steep", "daskinfer", 3000, out_of_memory=40)
    assert len(result.answered) == 3000
    assert 1 <= result.failures <= 6
    assert max(result.sizes) <= 40


@pytest.mark.parametrize(
    ("shape", "share", "seconds"),
    [
        ("steep", 0.9, 0.100),
        ("knee", 0.9, 0.030),
        ("cpu", 0.6, 0.020),
        ("sizes", 0.8, 0.040),
    ],
)
def test_share_answered_in_time(shape: str, share: float, seconds: float) -> None:
    ours = load(
        shape, "daskinfer", share, EQUAL[4], count=10_000, noise=0.05, jitter=1 / 3
    )
    assert ours.within(seconds) >= 0.98
