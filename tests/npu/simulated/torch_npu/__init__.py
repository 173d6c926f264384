"""A simulated Ascend plug-in: two NPUs for torch's CPU build, under the real name.

It is found, imported and detected like the real ``torch_npu``: torch imports it by
itself when this folder's parent is on the path.  It is built at the first import.

Environment variables
---------------------
ASCEND_RT_VISIBLE_DEVICES
    As for the real one: ids in ascending order, else no device is visible.
SIMULATED_NPUS
    How many devices the host has (2).
SIMULATED_NPU_BYTES
    Memory of each (1 GiB).

`simulator` has the knobs and counters; `visible_ids` are the host's ids of the devices
that this process sees as 0, 1, ...
"""

from __future__ import annotations

import itertools
import os
import sys


def _autoload() -> None:
    """Be the entry point by which torch loads its back-ends; importing was all."""


import torch  # noqa: E402  (torch may ask for the entry point while it is imported)
from simulated_npu_extension import load_extension  # noqa: E402

__version__ = "2.13.0+simulated"


def _visible_ids() -> list[int]:
    count = int(os.environ.get("SIMULATED_NPUS", "2"))
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    try:
        ids = [int(part) for part in visible.split(",")]
    except ValueError:
        return []
    in_order = all(first < second for first, second in itertools.pairwise(ids))
    return ids if in_order and 0 <= ids[0] and ids[-1] < count else []


simulator = load_extension()
visible_ids = _visible_ids()
simulator.set_devices(
    [int(os.environ.get("SIMULATED_NPU_BYTES", 1 << 30))] * len(visible_ids)
)

torch.utils.rename_privateuse1_backend("npu")

from torch_npu import npu  # noqa: E402  (needs the device type's name)

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_storage=True
)
sys.modules["torch.npu"] = npu
