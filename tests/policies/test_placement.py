from __future__ import annotations

from collections.abc import Sequence

import pytest

from scheduler_plugins.load import DeviceLoad, Flight
from scheduler_plugins.placement import (
    Candidate,
    LeastLoaded,
    Placement,
    RoundRobin,
    resolve,
)


class Last(Placement):
    def choose(self, candidates: Sequence[Candidate], now: float) -> Candidate:
        return candidates[-1]


class Broken(Placement):
    pass


def candidate(device: DeviceLoad, finishes: float = 1.0) -> Candidate:
    return Candidate(device, 8, False, 0.0, finishes, 0.0)


@pytest.fixture
def devices() -> list[DeviceLoad]:
    return [DeviceLoad(f"device-{i}", "npu") for i in range(3)]


def test_least_loaded_takes_the_first_to_finish(devices: list[DeviceLoad]) -> None:
    candidates = [
        candidate(d, t) for d, t in zip(devices, (3.0, 1.0, 2.0), strict=True)
    ]
    assert LeastLoaded().choose(candidates, 0.0).device is devices[1]


def test_least_loaded_rotates_ties(devices: list[DeviceLoad]) -> None:
    placement, chosen = LeastLoaded(), []
    for i in range(6):
        device = placement.choose([candidate(d) for d in devices], float(i)).device
        device.send(Flight("b", 1, float(i), lambda: 0.0))
        chosen.append(device.name)
    assert chosen == [f"device-{i}" for i in (0, 1, 2, 0, 1, 2)]


def test_round_robin_does_not_care_and_serves_who_joins(
    devices: list[DeviceLoad],
) -> None:
    placement = RoundRobin()
    old = [candidate(d, t) for d, t in zip(devices[:2], (9.0, 1.0), strict=True)]
    first = [placement.choose(old, 0.0).device.name for _ in range(3)]
    assert first == ["device-0", "device-1", "device-0"]
    joined = [*old, candidate(devices[2])]
    then = [placement.choose(joined, 0.0).device.name for _ in range(4)]
    assert then == ["device-2", "device-1", "device-0", "device-2"]


def test_resolve() -> None:
    assert isinstance(resolve("least-loaded"), LeastLoaded)
    assert isinstance(resolve("round-robin"), RoundRobin)
    assert isinstance(resolve("scheduler_plugins.placement.RoundRobin"), RoundRobin)
    assert isinstance(resolve(Last), Last)
    mine = Last()
    assert resolve(mine) is mine


@pytest.mark.parametrize("name", ["random", "", "least loaded", "a..b", "1.2"])
def test_an_unknown_name_is_answered_with_those_that_exist(name: str) -> None:
    with pytest.raises(ValueError, match=r"'least-loaded', 'round-robin'"):
        resolve(name)


@pytest.mark.parametrize("path", ["no.such.Module", "collections.NoSuchClass"])
def test_a_class_that_cannot_be_imported(path: str) -> None:
    with pytest.raises(ValueError, match=f"placement '{path}' cannot be imported"):
        resolve(path)


@pytest.mark.parametrize("spec", ["collections.OrderedDict", "os.getcwd", dict, 3])
def test_what_is_no_placement(spec: object) -> None:
    with pytest.raises(TypeError, match="must be a subclass"):
        resolve(spec)  # type: ignore[arg-type]


def test_a_placement_that_cannot_choose() -> None:
    with pytest.raises(TypeError, match="choose"):
        resolve(Broken)
