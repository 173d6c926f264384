"""The device layer, with torch_npu's own bookkeeping, texts and error codes."""

from __future__ import annotations

import threading

import pytest
import torch
import torch_npu
from torch import nn

from daskinfer.device import (
    DeviceNotFound,
    HostDevice,
    NpuDevice,
    detect,
    host_devices,
    host_report,
    open_device,
)


@pytest.fixture
def npu():
    return open_device("npu:1")


def test_it_is_the_real_one():
    assert torch_npu.__version__.startswith("2.13.")
    assert "simulated" not in torch_npu.__version__


def test_detection():
    report = detect()
    assert (report.best, report["npu"].count) == ("npu", 2)
    assert host_devices() == [
        HostDevice("npu", 0, "Ascend910B1"),
        HostDevice("npu", 1, "Ascend910B1"),
    ]


@pytest.mark.parametrize("visible", ["", "1,0"])
def test_what_hides_all_devices_is_the_reason(monkeypatch, visible):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert host_devices() == []
    assert f"ASCEND_RT_VISIBLE_DEVICES={visible!r}" in host_report()["npu"].reason


def test_without_cann_the_missing_library_is_named(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    report = host_report()
    assert report.best == "cpu"
    assert report["npu"].reason.startswith(
        "torch_npu is installed but CANN was not found: libhccl.so:"
    )


def test_name_and_class(npu):
    assert isinstance(npu, NpuDevice)
    assert npu.torch_device == torch.device("npu:1")
    assert npu.device_class == "npu/Ascend910B1"
    assert npu.utilization() == 0.07


def test_operators_are_not_compiled_one_by_one(npu):
    assert torch.npu.is_jit_compile_false()


def test_an_index_beyond_the_last_is_refused():
    with pytest.raises(DeviceNotFound, match="highest npu index of this process is 1"):
        open_device("npu:2")


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (
            lambda: nn.Sequential(
                nn.Conv2d(1, 4, 3),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(36, 10),
            ),
            (3, 1, 8, 8),
        ),
        (lambda: nn.TransformerEncoderLayer(16, 2, batch_first=True), (2, 5, 16)),
        (lambda: nn.LSTM(8, 4, batch_first=True), (2, 5, 8)),
    ],
    ids=["convolutional", "attention", "recurrent"],
)
def test_a_forward_pass_there_and_back(npu, build, shape):
    net = build().eval()
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = net(x)
        with npu.active():
            found = net.to(npu.torch_device)(npu.put(x))
    if isinstance(found, tuple):
        expected, found = expected[0], found[0]
    assert found.device == npu.torch_device
    torch.testing.assert_close(npu.to_host(found), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("pinned", [False, True])
def test_types_survive_the_transfer(npu, dtype, pinned):
    x = torch.tensor([0, 1, 1]).to(dtype)
    y = npu.to_host(npu.put(x.pin_memory() if pinned else x))
    assert (y.device.type, y.dtype) == ("cpu", dtype)
    assert torch.equal(x, y)


def test_the_current_device_is_set_and_restored_per_thread(npu):
    seen = {}

    def elsewhere() -> None:
        seen["elsewhere"] = torch.empty(1, device="npu").device.index

    with npu.active():
        seen["inside"] = torch.empty(1, device="npu").device.index
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    seen["after"] = torch.empty(1, device="npu").device.index
    assert seen == {"inside": 1, "elsewhere": 0, "after": 0}


def test_memory(npu):
    npu.empty_cache()
    free_before, total = npu.memory()
    allocated_before = npu.allocated()
    assert total == 1 << 30
    kept = npu.put(torch.ones(16 << 20))
    assert npu.allocated() - allocated_before >= 64 << 20
    assert free_before - npu.memory()[0] >= 64 << 20
    del kept
    npu.empty_cache()
    assert npu.allocated() == allocated_before
    assert npu.memory()[0] == free_before


def test_out_of_memory_is_recognized_and_the_device_works_on(npu):
    with pytest.raises(RuntimeError, match="NPU out of memory") as caught:
        torch.empty(8 << 30, dtype=torch.uint8, device=npu.torch_device)
    assert npu.is_out_of_memory(caught.value)
    assert not npu.is_fatal(caught.value)
    assert npu.to_host(npu.put(torch.ones(2))).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("code", "fatal"), [(507015, True), (507018, True), (507899, True), (107003, False)]
)
def test_error_codes_are_read_from_what_torch_npu_raises(
    npu, fail_next_synchronization, code, fatal
):
    npu.put(torch.ones(1))
    npu.synchronize()
    fail_next_synchronization(code)
    with pytest.raises(RuntimeError, match=str(code)) as caught:
        npu.synchronize()
    assert npu.is_fatal(caught.value) is fatal
    assert not npu.is_out_of_memory(caught.value)
