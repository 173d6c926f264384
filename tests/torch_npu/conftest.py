"""For the environment that run.py makes: the real torch_npu over a stand-in CANN."""

from __future__ import annotations

import ctypes

import cpu_kernels  # noqa: F401
import pytest

collect_ignore = ["run.py", "cpu_kernels.py", "stand_in_cann"]


@pytest.fixture
def fail_next_synchronization():
    """Let the next synchronization answer with an error code of ACL."""
    fail_next = ctypes.CDLL("libascendcl.so").stand_in_fail_next
    yield fail_next
    fail_next(0)
