"""What the C library does with memory that is freed, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from daskinfer.device.allocator import _is_glibc

pytestmark = pytest.mark.skipif(not _is_glibc(), reason="the C library is not glibc")

#: Page faults of allocating and freeing 8 MiB, as in every pass of a larger network.
FAULTS = """
import resource, sys
import dask
dask.config.set({"daskinfer.cpu.keep-memory": sys.argv[1]})
from daskinfer.device import open_device
open_device("cpu")
import torch
torch.ones(2 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(2 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keep: str) -> int:
    """Of a process with the environment that Dask's nannies give their workers."""
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS, keep],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return int(ran.stdout)


def test_freed_memory_serves_the_next_pass() -> None:
    """Twenty times 8 MiB are 40,960 pages where nothing is kept."""
    assert page_faults("64 MiB") < page_faults("0") / 2
