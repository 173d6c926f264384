"""The device layer on the simulated NPU."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

from daskinfer.device import (
    DeviceNotFound,
    HostDevice,
    NpuDevice,
    detect,
    host_devices,
    open_device,
)


@pytest.fixture
def npu():
    return open_device("npu:1")


def test_detection_counts_the_devices():
    report = detect()
    assert report.best == "npu"
    assert report["npu"].count == 2
    assert report["npu"].reason == "torch_npu sees 2 devices"
    assert report["cuda"].count == 0


def test_another_process_gives_the_names():
    assert host_devices() == [
        HostDevice("npu", 0, "Ascend910B1"),
        HostDevice("npu", 1, "Ascend910B1"),
    ]


@pytest.mark.parametrize("visible", ["", "1,0", "9"])
def test_what_hides_all_devices_is_the_reason(monkeypatch, visible):
    from daskinfer.device import host_report

    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert host_devices() == []
    assert f"ASCEND_RT_VISIBLE_DEVICES={visible!r}" in host_report()["npu"].reason


def test_auto_takes_the_npu():
    device = open_device()
    assert isinstance(device, NpuDevice)
    assert device.torch_device == torch.device("npu:0")


def test_name_and_class(npu):
    assert npu.name == "Ascend910B1"
    assert npu.device_class == "npu/Ascend910B1"
    assert repr(npu) == "<NpuDevice npu:1 'Ascend910B1'>"


def test_operators_are_not_compiled_one_by_one(npu):
    assert torch.npu.is_jit_compile_false()


def test_an_index_beyond_the_last_is_refused():
    with pytest.raises(DeviceNotFound, match="highest npu index of this process is 1"):
        open_device("npu:2")


def test_a_device_that_does_not_open_is_refused_with_the_drivers_words(monkeypatch):
    def broken(index: int) -> str:
        raise RuntimeError("Initialize failed, error code is 507899")

    monkeypatch.setattr(torch.npu, "get_device_name", broken)
    with pytest.raises(DeviceNotFound, match=r"could not be opened: .* 507899"):
        open_device("npu:0")


def test_a_forward_pass_there_and_back(npu, simulator):
    net = nn.Linear(8, 4).eval()
    x = torch.randn(2, 8)
    expected = net(x)
    net.to(npu.torch_device)
    simulator.reset_counters()
    with npu.active(), torch.inference_mode():
        y = npu.to_host(net(npu.put(x)))
    npu.synchronize()
    assert y.device.type == "cpu"
    torch.testing.assert_close(y, expected)
    counted = simulator.counters(1)
    assert (counted["to_device"], counted["to_host"]) == (1, 1)
    assert counted["synchronizations"] == 1
    assert simulator.counters(0)["operators"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64])
def test_types_survive_the_transfer(npu, dtype):
    x = torch.tensor([0, 1, 1]).to(dtype)
    y = npu.to_host(npu.put(x))
    assert y.dtype == dtype
    assert torch.equal(x, y)


def test_what_is_there_is_not_copied(npu, simulator):
    x = npu.put(torch.ones(3))
    simulator.reset_counters()
    assert npu.put(x) is x
    assert npu.put(torch.ones(3).pin_memory()).device == npu.torch_device
    assert simulator.counters(1)["to_device"] == 1


def test_results_carry_no_graph(npu):
    x = npu.put(torch.ones(3)).requires_grad_()
    assert not npu.to_host(x * 2).requires_grad


def test_the_current_device_is_set_and_restored_per_thread(npu):
    inside = threading.Event()
    looked = threading.Event()
    seen = {}

    def elsewhere() -> None:
        assert inside.wait(timeout=60)
        seen["elsewhere"] = torch.ones(1, device="npu").device.index
        looked.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with npu.active():
        seen["inside"] = torch.ones(1, device="npu").device.index
        inside.set()
        assert looked.wait(timeout=60)
    thread.join()
    seen["after"] = torch.ones(1, device="npu").device.index
    assert seen == {"inside": 1, "elsewhere": 0, "after": 0}


def test_memory(npu, simulator):
    npu.empty_cache()
    simulator.set_limit(1, 64 << 20)
    simulator.set_used_by_others(1, 16 << 20)
    assert npu.memory() == (48 << 20, 64 << 20)
    kept = npu.put(torch.ones(1 << 20))
    assert npu.allocated() == 4 << 20
    assert npu.memory() == (44 << 20, 64 << 20)
    del kept
    assert npu.allocated() == 0
    assert npu.memory() == (44 << 20, 64 << 20)
    npu.empty_cache()
    assert npu.memory() == (48 << 20, 64 << 20)


def test_utilization(npu, monkeypatch):
    assert npu.utilization() == 0
    monkeypatch.setattr(torch.npu, "utilization", lambda device: 25)
    assert npu.utilization() == 0.25

    def unsupported(device: object) -> int:
        raise RuntimeError("not supported on this chip")

    monkeypatch.setattr(torch.npu, "utilization", unsupported)
    assert npu.utilization() is None


def test_out_of_memory_is_recognized_and_the_device_works_on(npu, simulator):
    simulator.set_limit(1, 4 << 20)
    with pytest.raises(RuntimeError) as caught:
        npu.put(torch.ones(2 << 20))
    assert npu.is_out_of_memory(caught.value)
    assert not npu.is_fatal(caught.value)
    assert npu.to_host(npu.put(torch.ones(2))).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("message", "fatal", "out_of_memory"),
    [
        ("aclrtSynchronizeStream failed, error code is 507015", True, False),
        ("aclrtSynchronizeStream failed, error code is 507035", True, False),
        ("aclrtMalloc failed, error code is 207001", False, True),
        ("aclrtSetDevice failed, error code is 107001", False, False),
        ("mat1 and mat2 shapes cannot be multiplied", False, False),
    ],
)
def test_errors_of_operators_are_classified(
    npu, simulator, message, fatal, out_of_memory
):
    x = npu.put(torch.ones(2))
    simulator.fail_next("aten::relu", message)
    with pytest.raises(RuntimeError) as caught:
        torch.relu(x)
    assert npu.is_fatal(caught.value) is fatal
    assert npu.is_out_of_memory(caught.value) is out_of_memory


def test_looking_at_the_host_opens_no_device_here():
    # The variable is read by the process that is asked, not changed here.
    before = dict(os.environ)
    host_devices()
    assert dict(os.environ) == before
