from __future__ import annotations

import pytest

from daskinfer import cluster
from daskinfer.device import (
    BackendReport,
    CudaDevice,
    DeviceReport,
    NpuDevice,
)
from daskinfer.device import host as host_module

# Of processes that are started with it on their path.
collect_ignore = ["gpu_host"]


@pytest.fixture
def bare_host(monkeypatch):
    """Whatever this host has, there is only its CPU."""
    npu = BackendReport("npu", 0, "no NPU in this test")
    cuda = BackendReport("cuda", 0, "no CUDA in this test")
    report = DeviceReport((npu, cuda, BackendReport("cpu", 1, "always")))
    monkeypatch.setattr(NpuDevice, "report", lambda: npu)
    monkeypatch.setattr(CudaDevice, "report", lambda: cuda)
    monkeypatch.setattr(host_module, "host_report", lambda: report)
    monkeypatch.setattr(cluster, "host_report", lambda: report)


@pytest.fixture
def two_npus(monkeypatch):
    """As far as a parent process can tell, this host has two NPUs."""
    npu = BackendReport("npu", 2, "two of them", ("Ascend910B1", "Ascend910B1"))
    report = DeviceReport((npu, BackendReport("cpu", 1, "always")))
    monkeypatch.setattr(host_module, "host_report", lambda: report)
    monkeypatch.setattr(cluster, "host_report", lambda: report)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
