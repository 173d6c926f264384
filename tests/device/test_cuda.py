"""What of the CUDA back-end can be told without a GPU: reasons, names, utilization."""

from __future__ import annotations

import types
import warnings

import pytest
import torch

from daskinfer.device import CudaDevice


@pytest.fixture
def cuda_build(monkeypatch):
    """A torch built with CUDA, whose driver answers as the test says."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def answer(count: int, warning: str | None = None) -> None:
        def is_available() -> bool:
            if warning is not None:
                warnings.warn(warning, stacklevel=1)
            return count > 0

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return answer


def test_devices_are_counted(cuda_build):
    cuda_build(2)
    report = CudaDevice.report()
    assert (report.kind, report.count) == ("cuda", 2)
    assert report.reason.endswith("sees 2 CUDA devices")


def test_a_build_without_cuda_is_the_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "is built without CUDA" in CudaDevice.report().reason


def test_the_drivers_warning_is_the_reason(cuda_build):
    cuda_build(0, "CUDA initialization: The NVIDIA driver is too old\nUpdate it")
    reason = "CUDA initialization: The NVIDIA driver is too old"
    assert CudaDevice.report().reason == reason


def test_hidden_devices_are_the_reason(cuda_build, monkeypatch):
    cuda_build(0)
    assert CudaDevice.report().reason == "no NVIDIA device or driver was found"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert CudaDevice.report().reason == "no device is visible: CUDA_VISIBLE_DEVICES=''"


def test_class_and_utilization(monkeypatch):
    vendor = types.SimpleNamespace(
        get_device_name=lambda index: "NVIDIA H200 NVL", utilization=lambda device: 40
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: vendor)
    device = CudaDevice(1)
    assert device.torch_device == torch.device("cuda:1")
    assert (device.name, device.device_class) == ("NVIDIA H200 NVL", "cuda/H200-NVL")
    assert device.utilization() == 0.4

    def no_library(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    vendor.utilization = no_library
    assert device.utilization() is None
