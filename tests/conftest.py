"""What all tests share: strict Dask settings, one thread per process, fixtures."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests import encrypted

if threading.current_thread() is threading.main_thread():
    # What a shell starts in the background ignores it, and so would all processes here.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Worker processes inherit these. Set before NumPy, torch and Dask are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DASK_DISTRIBUTED__SCHEDULER__VALIDATE"] = "True"
os.environ["DASK_DISTRIBUTED__WORKER__VALIDATE"] = "True"
os.environ["HF_HUB_OFFLINE"] = "1"
# No test finds the weights of an earlier run.
os.environ["DASK_DASKINFER__ARTIFACTS__DIRECTORY"] = tempfile.mkdtemp()
made_here = [os.environ["DASK_DASKINFER__ARTIFACTS__DIRECTORY"]]
if encrypted.tenths():
    made_here.append(str(encrypted.encrypt()))

import dask.config  # noqa: E402

dask.config.refresh()

import daskinfer.config  # noqa: E402

# isort: split
# Only now: utils_test notes the configuration that it sees when it is imported, and
# goes back to that, the project's defaults included, between tests.
from distributed import Nanny  # noqa: E402
from distributed.utils_test import cleanup, loop, loop_in_thread  # noqa: E402

from daskinfer import logs  # noqa: E402

__all__ = ["cleanup", "daskinfer", "loop", "loop_in_thread"]


@pytest.fixture(autouse=True, scope="session")
def directories_are_removed() -> Iterator[None]:
    """Leave no weights and no certificates behind."""
    yield
    for directory in made_here:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_line_is_left_out() -> None:
    """Let each test log, however much those before it have logged a moment ago."""
    logs.begin_anew()


@pytest.fixture(autouse=True, scope="session")
def nannies_validate() -> Iterator[None]:
    """Let workers in processes validate too: a nanny ignores the configuration."""
    init = Nanny.__init__

    @functools.wraps(init)
    def validating(self: Nanny, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("validate", True)
        init(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nanny, "__init__", validating)
        yield
