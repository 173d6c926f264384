"""What all tests share: strict Dask settings, one thread per process, fixtures."""

from __future__ import annotations

import os

# Worker processes inherit these. Set before NumPy, torch and Dask are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DASK_DISTRIBUTED__SCHEDULER__VALIDATE"] = "True"
os.environ["DASK_DISTRIBUTED__WORKER__VALIDATE"] = "True"
os.environ["DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__GIL__ENABLED"] = "False"
os.environ["HF_HUB_OFFLINE"] = "1"

import dask.config

dask.config.refresh()

import daskinfer.config  # noqa: E402

# isort: split
# Only now: this module notes the configuration that it sees when it is imported, and
# goes back to that, the project's defaults included, between tests.
from distributed.utils_test import cleanup, loop, loop_in_thread  # noqa: E402

__all__ = ["cleanup", "daskinfer", "loop", "loop_in_thread"]
