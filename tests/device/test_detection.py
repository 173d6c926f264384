"""Detection in fresh processes: what torch and its plug-ins do happens only once."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from daskinfer.device import (
    BackendReport,
    DeviceNotFound,
    DeviceReport,
    HostDevice,
    detect,
    host_devices,
    host_report,
    open_device,
    parse_device,
    worker_environment,
)
from daskinfer.device import host as host_module

ROOT = Path(__file__).parents[2]

DETECT = """
import json, os, sys
from daskinfer.device import detect
report = detect()
import torch
print(json.dumps({
    "best": report.best,
    "npu": [report["npu"].count, report["npu"].reason],
    "autoload": os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"),
    "works": torch.ones(2).sum().item() == 2,
}))
"""

# What the 2.13.0 wheel raises where CANN is missing.
NO_CANN = """
raise ImportError(
    "libhccl.so: cannot open shared object file: No such file or directory"
)
"""
NO_DRIVER = """
import sys, types
import torch

def device_count():
    raise RuntimeError("Initialize:build/NPUCaching.cpp:10 error code is 207004\\nmore")

torch.npu = types.SimpleNamespace(device_count=device_count)
"""
NO_DEVICE = """
import sys, types
import torch

torch.npu = types.SimpleNamespace(device_count=lambda: 0)
"""
WRONG_VERSION = """
raise RuntimeError("torch_npu 2.13 needs torch 2.13\\nand not this one")
"""


def install_torch_npu(site: Path, source: str) -> None:
    """Write a torch_npu that torch finds and imports by itself, as the real one."""
    package = site / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(source + "\n\ndef _autoload(): pass\n")
    metadata = site / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    )


def run_python(code: str, *paths: Path, **environment: str) -> str:
    path = os.pathsep.join(map(str, (ROOT, *paths)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def detect_in_new_process(tmp_path: Path, source: str, **environment: str) -> dict:
    install_torch_npu(tmp_path, source)
    return json.loads(run_python(DETECT, tmp_path, **environment))


def test_torch_npu_without_cann_is_explained_and_torch_still_works(tmp_path):
    found = detect_in_new_process(tmp_path, NO_CANN)
    count, reason = found["npu"]
    assert count == 0
    assert reason.startswith(
        "torch_npu is installed but CANN was not found: libhccl.so:"
    )
    assert "set_env.sh" in reason
    assert found["best"] == "cpu"
    assert found["works"]


def test_children_of_a_process_without_cann_can_import_torch(tmp_path):
    install_torch_npu(tmp_path, NO_CANN)
    code = """
import subprocess, sys
from daskinfer.device import load_torch
load_torch()
subprocess.run([sys.executable, "-c", "import torch; print('fine')"], check=True)
"""
    assert run_python(code, tmp_path) == "fine\n"


def test_the_simulated_installation_breaks_import_torch_as_the_real_one(tmp_path):
    install_torch_npu(tmp_path, NO_CANN)
    with pytest.raises(AssertionError, match="Failed to load the backend extension"):
        run_python("import torch", tmp_path)


def test_a_plug_in_that_loads_leaves_the_environment_alone(tmp_path):
    found = detect_in_new_process(tmp_path, NO_DEVICE)
    assert found["autoload"] is None


@pytest.mark.parametrize(
    ("visible", "reason"),
    [(None, "is the driver running"), ("1,0", "'1,0' must list existing ids")],
)
def test_no_device_is_explained(tmp_path, visible, reason):
    environment = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    found = detect_in_new_process(tmp_path, NO_DEVICE, **environment)
    assert found["npu"][0] == 0
    assert reason in found["npu"][1]


def test_a_broken_driver_is_explained(tmp_path):
    found = detect_in_new_process(tmp_path, NO_DRIVER)
    assert found["npu"][0] == 0
    assert found["npu"][1].startswith("the Ascend driver answered: ")
    assert "207004" in found["npu"][1]
    assert "more" not in found["npu"][1]


def test_any_other_failure_of_the_plug_in_is_named(tmp_path):
    found = detect_in_new_process(tmp_path, WRONG_VERSION)
    assert found["npu"] == [
        0,
        "torch_npu is installed but could not be imported: RuntimeError: "
        "torch_npu 2.13 needs torch 2.13",
    ]


def test_every_backend_has_a_reason():
    report = detect()
    assert [backend.kind for backend in report.backends] == ["npu", "cuda", "cpu"]
    assert all(backend.reason for backend in report.backends)
    assert "daskinfer[npu]" in report["npu"].reason
    assert str(report).count("\n") == 2


def test_an_exception_in_a_backend_becomes_its_reason(monkeypatch):
    def explode() -> BackendReport:
        raise OSError("no such driver")

    monkeypatch.setattr("daskinfer.device.npu.NpuDevice.report", explode)
    assert detect()["npu"].reason == "detection failed: OSError: no such driver"


@pytest.mark.parametrize("spec", ["gpu", "npu:", "npu:x", "cpu:-1", "auto:0", "", "²"])
def test_an_unknown_device_is_refused(spec):
    with pytest.raises(ValueError, match="device="):
        parse_device(spec)


@pytest.mark.parametrize("spec", ["npu", "npu:3", "cuda"])
def test_a_missing_device_says_why(bare_host, spec):
    with pytest.raises(DeviceNotFound, match=f"device '{spec}' cannot be used: .+"):
        open_device(spec)


def test_an_index_beyond_the_last_device_is_named():
    with pytest.raises(DeviceNotFound, match="highest cpu index of this process is 0"):
        open_device("cpu:1")


def test_device_not_found_pickles():
    error = DeviceNotFound("npu", "no CANN")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.spec, copy.reason, str(copy)) == ("npu", "no CANN", str(error))


def test_an_unknown_backend_is_a_key_error():
    with pytest.raises(KeyError, match="tpu"):
        DeviceReport(())["tpu"]


def test_looking_at_the_host_does_not_import_torch():
    code = """
import sys
from daskinfer.device import host_devices, worker_environment
host_devices()
worker_environment("cpu")
print("torch" in sys.modules)
"""
    assert run_python(code) == "False\n"


def test_a_host_without_accelerators_has_no_devices(bare_host):
    assert host_devices() == []


def test_devices_of_a_host_have_kind_index_and_name(two_npus):
    assert host_devices() == [
        HostDevice("npu", 0, "Ascend910B1"),
        HostDevice("npu", 1, "Ascend910B1"),
    ]


def test_the_new_process_reports_what_this_one_would(monkeypatch):
    monkeypatch.setattr(host_module, "_installed_torch", lambda: "2.13.0")
    report = host_report()
    assert report["npu"] == detect()["npu"]
    assert report["cuda"] == detect()["cuda"]


def test_a_process_that_cannot_look_gives_the_reason(monkeypatch, caplog):
    monkeypatch.setattr(host_module, "_installed_torch", lambda: "2.13.0")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    report = host_report()
    assert report.best == "cpu"
    assert "looks for devices ended with 1: ModuleNotFound" in report["cuda"].reason
    assert "Could not look for devices" in caplog.text


def test_a_driver_that_hangs_does_not_hang_the_caller(monkeypatch):
    monkeypatch.setattr(host_module, "_installed_torch", lambda: "2.13.0")
    monkeypatch.setattr(host_module, "_PROBE_TIMEOUT", 0.0)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/asked-for-the-first-time")
    assert "did not answer" in host_report()["npu"].reason
    monkeypatch.setattr(host_module, "_PROBE_TIMEOUT", 120.0)
    assert "did not answer" not in host_report()["npu"].reason


class TestWorkerEnvironment:
    def test_a_device_is_the_only_visible_one(self, monkeypatch):
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
        assert worker_environment("npu", 3) == {"ASCEND_RT_VISIBLE_DEVICES": "3"}

    def test_the_index_counts_what_this_process_sees(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8932f937")
        environment = worker_environment("cuda", 1)
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-8932f937"

    def test_an_index_that_is_not_visible_is_refused(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
        with pytest.raises(ValueError, match="index=1 is not in CUDA_VISIBLE_DEVICES"):
            worker_environment("cuda", 1)

    def test_a_cpu_worker_sees_no_accelerator(self):
        assert worker_environment("cpu", threads=2) == {
            "ASCEND_RT_VISIBLE_DEVICES": "",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "2",
            "MKL_NUM_THREADS": "2",
            "OPENBLAS_NUM_THREADS": "2",
        }

    def test_torch_does_not_load_a_plug_in_that_is_not_wanted(self, monkeypatch):
        monkeypatch.setattr(host_module, "npu_is_installed", lambda: True)
        assert worker_environment("cpu")["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in worker_environment("npu")

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(ValueError, match="kind='gpu' is unknown"):
            worker_environment("gpu")
