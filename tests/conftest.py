"""What all tests share: strict Dask settings, one thread per process, fixtures."""

from __future__ import annotations

import functools
import inspect
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
from distributed.utils_test import (  # noqa: E402
    cleanup,
    gen_cluster,
    loop,
    loop_in_thread,
)

from daskinfer import logs  # noqa: E402

__all__ = ["cleanup", "daskinfer", "loop", "loop_in_thread"]


def let_tests_take(seconds: float) -> None:
    """Give tests with a cluster so much time where they say nothing else.

    Dask's own half a minute is not enough on a machine that is busy with others.
    """
    parameters = inspect.signature(gen_cluster).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    gen_cluster.__defaults__ = tuple({**defaults, "timeout": seconds}.values())


let_tests_take(seconds=120)


@pytest.fixture(autouse=True, scope="session")
def directories_are_removed() -> Iterator[None]:
    """Leave no weights and no certificates behind."""
    yield
    for directory in made_here:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def environment_is_as_before() -> Iterator[None]:
    """Let no test hand its variables on to the processes of those that follow."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


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
