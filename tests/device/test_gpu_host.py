"""Workers on a host with two GPUs, of which the driver alone is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import PATIENCE, environment

pytest.importorskip("pynvml")
pytest.importorskip("prometheus_client")

pytestmark = pytest.mark.process

HOST = Path(__file__).parent / "gpu_host"
GIB = 1 << 30
TOTAL = 141 * GIB
#: Of the second GPU.
USED, UTILIZATION = 30 * GIB, 60
METRIC = "dask_inference_device"


def on_gpu_host(what: str, **variables: str) -> Any:
    """What a process tells that has the host's driver."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.device.on_gpu_host", what],
        env=environment({"PYTHONPATH": str(HOST), **variables}),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_worker_for_each_which_declares_it() -> None:
    assert on_gpu_host("plan") == [
        {"resources": {"GPU": 1}, "visible": "0"},
        {"resources": {"GPU": 1}, "visible": "1"},
    ]


def test_dasks_own_metric_is_left_alone() -> None:
    told = on_gpu_host("serve", CUDA_VISIBLE_DEVICES="1")
    assert told["answer"] == [[2.0, 2.0]]
    dasks = {"memory-used": USED, "utilization": UTILIZATION}
    assert told["before"] == {"gpu": dasks, "gpu_utilization": UTILIZATION}
    assert told["metrics"]["gpu"] == dasks
    assert told["metrics"]["gpu_utilization"] == UTILIZATION
    # For the table of workers, and for Prometheus.
    assert told["metrics"]["gpu_memory"] == USED
    assert told["device"] == {
        f"{METRIC}_memory_used_bytes": ["cuda:0", USED],
        f"{METRIC}_memory_total_bytes": ["cuda:0", TOTAL],
        f"{METRIC}_utilization_ratio": ["cuda:0", UTILIZATION / 100],
    }
    # With what Dask tells once, when a worker comes.
    about = {"name": "NVIDIA H200", "memory-total": TOTAL}
    assert told["telemetry"] == {"gpu": dasks | about}


def test_where_dask_measures_none() -> None:
    told = on_gpu_host("serve", CUDA_VISIBLE_DEVICES="1", WITHOUT_NVML="1")
    assert told["answer"] == [[2.0, 2.0]]
    assert told["before"] == {"gpu": None, "gpu_utilization": None}
    ours = {
        "device": "cuda:0",
        "name": "NVIDIA H200",
        "memory-used": USED,
        "memory-total": TOTAL,
        "utilization": None,
    }
    assert told["metrics"] == {
        "gpu": ours,
        "gpu_memory": USED,
        "gpu_utilization": None,
    }
    assert told["device"] == {
        f"{METRIC}_memory_used_bytes": ["cuda:0", USED],
        f"{METRIC}_memory_total_bytes": ["cuda:0", TOTAL],
    }
    assert told["telemetry"] == {"gpu": ours}
