"""Puts a simulated NPU where torch and every process of these tests find it.

A device type is registered once per process and stays, so these tests have a pytest
process of their own: ``pytest tests/npu``.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.npu.simulated.simulated_npu_extension import COMPILER, library_path
from tests.tools import require_tool

SIMULATED = Path(__file__).parent / "simulated"

collect_ignore = ["simulated"]

# Without it these modules import plain torch, and each test says what is missing.
AVAILABLE = library_path().exists() or shutil.which(COMPILER) is not None

if AVAILABLE:
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "SIMULATED_NPUS", "SIMULATED_NPU_BYTES"):
        os.environ.pop(name, None)
    sys.path.insert(0, str(SIMULATED))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(SIMULATED), os.environ.get("PYTHONPATH")])
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.npu)


@pytest.fixture(autouse=True)
def simulator():
    """The knobs and counters of this process's two devices, as new."""
    if not AVAILABLE:
        require_tool(COMPILER)
    from daskinfer.device import load_torch

    load_torch()
    import torch_npu

    knobs = torch_npu.simulator
    start_over(knobs)
    yield knobs
    start_over(knobs)


def start_over(knobs) -> None:
    import torch

    gc.collect()  # Tensors in reference cycles of the test before would be counted.
    for index in (0, 1):
        with torch.npu.device(index):
            torch.npu.empty_cache()
        knobs.set_limit(index, 1 << 30)
        knobs.set_used_by_others(index, 0)
    knobs.set_op_seconds(0.0)
    knobs.fail_next("", "", 0)
    knobs.set_device(0)
    knobs.reset_counters()
