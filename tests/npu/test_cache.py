"""The cache's tier on a device, on the simulated NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.cache import TieredCache, TierPolicy
from daskinfer.device import Device, open_device

LARGE = TierPolicy(1 << 24, "1h")
BELOW = {"host": LARGE, "packed": LARGE, "disk": LARGE}


@pytest.fixture
def npu() -> Device:
    return open_device("npu:0")


def cache_of(npu: Device | None, directory: Path, **tiers: Any) -> TieredCache:
    every = dict.fromkeys(("device", "host", "packed", "disk")) | tiers
    return TieredCache(directory, device=npu, tiers=every)


def value_on(npu: Device) -> dict[str, Any]:
    return {
        "device": npu.put(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)),
        "host": [torch.ones(2), np.arange(3)],
        "empty": (npu.put(torch.zeros(0, 3)), None),
    }


def check(found: dict[str, Any]) -> None:
    assert found["device"].device == torch.device("npu:0")
    assert found["device"].dtype is torch.bfloat16
    assert found["device"].cpu().float().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert found["host"][0].device.type == "cpu"
    assert found["host"][1].tolist() == [0, 1, 2]
    assert found["empty"][0].device == torch.device("npu:0")
    assert found["empty"][0].shape == (0, 3)


def test_tensors_stay_on_the_device(npu: Device, tmp_path: Path) -> None:
    cache = cache_of(npu, tmp_path, device=LARGE, **BELOW)
    value = value_on(npu)
    assert cache.put("key", value) == "device"
    value["device"].zero_()
    for _ in range(2):
        found = cache.get("key")
        check(found)
        found["device"].zero_()
    assert cache.stats()["device"].hits == 2


def test_what_has_nothing_on_the_device_goes_to_the_host(
    npu: Device, tmp_path: Path
) -> None:
    cache = cache_of(npu, tmp_path, device=LARGE, **BELOW)
    assert cache.put("key", [torch.ones(2)]) == "host"
    assert cache.get("key")[0].device.type == "cpu"
    assert cache.stats()["device"].refused == 0
    assert cache.stats()["device"].promotions == 0


@pytest.mark.parametrize("tier", ["host", "packed", "disk"])
def test_from_every_tier_tensors_come_back_to_the_device(
    tier: str, npu: Device, tmp_path: Path
) -> None:
    cache = cache_of(npu, tmp_path, device=LARGE, **BELOW)
    assert cache.put("key", value_on(npu), tier=tier) == tier
    check(cache.get("key", tiers=[tier]))
    for _ in range(2):
        check(cache.get("key"))
    assert cache.stats()["device"].promotions == 1
    assert cache.stats()["device"].hits == 1


def test_eviction_frees_the_devices_memory(npu: Device, tmp_path: Path) -> None:
    cache = cache_of(npu, tmp_path, device=TierPolicy(100_000), **BELOW)
    before = npu.allocated()
    for number in range(20):
        cache.put(str(number), npu.put(torch.full((5000,), float(number))))
    assert cache.stats()["device"].entries == 4
    assert npu.allocated() - before <= 100_000
    for number in range(20):
        found = cache.get(str(number))
        assert found.device == torch.device("npu:0")
        assert found.cpu().tolist() == [float(number)] * 5000
    del found
    cache.clear()
    assert npu.allocated() == before


def test_without_a_tier_there_tensors_return_all_the_same(
    npu: Device, tmp_path: Path
) -> None:
    cache = cache_of(npu, tmp_path, **BELOW)
    assert cache.put("key", value_on(npu)) == "host"
    check(cache.get("key"))


def test_what_is_too_large_for_the_device_goes_to_the_host(
    npu: Device, tmp_path: Path
) -> None:
    cache = cache_of(npu, tmp_path, device=TierPolicy(5000), **BELOW)
    assert cache.put("key", npu.put(torch.ones(5000))) == "host"
    assert cache.get("key").device == torch.device("npu:0")
    assert cache.stats()["device"].refused == 1


def test_a_later_process_without_the_device_gets_tensors_on_the_cpu(
    npu: Device, tmp_path: Path
) -> None:
    with cache_of(npu, tmp_path, device=LARGE, **BELOW) as cache:
        cache.put("key", value_on(npu))
    found = cache_of(None, tmp_path, **BELOW).get("key")
    assert found["device"].device.type == "cpu"
    assert found["device"].float().flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_tensors_of_another_device_are_not_stored(npu: Device, tmp_path: Path) -> None:
    cache = cache_of(npu, tmp_path, device=LARGE, **BELOW)
    assert cache.put("key", open_device("npu:1").put(torch.ones(2))) is None


def test_a_device_without_room_is_no_error(
    npu: Device, tmp_path: Path, simulator: Any
) -> None:
    cache = cache_of(npu, tmp_path, device=LARGE, **BELOW)
    cache.put("key", npu.put(torch.ones(50_000)))
    cache.put("other", [1])
    # Down on the host, and no room to come up again.
    for _ in range(2):
        cache._ladder.evict_oldest(cache._ladder.tiers[0])
    simulator.set_limit(0, npu.allocated())
    assert cache.get("key", default="missing") == "missing"
    assert cache.get("other") == [1]
    simulator.set_limit(0, 1 << 30)
    assert cache.get("key").cpu().tolist() == [1.0] * 50_000
