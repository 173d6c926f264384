"""``dask scheduler --preload scheduler_plugins``, as it is started in a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import popen

import daskinfer

pytestmark = [pytest.mark.process, pytest.mark.smoke]

MODEL = """
import torch

def build(factor):
    class Scale(torch.nn.Module):
        def forward(self, x):
            return factor * x

    return Scale()
"""


def loaded_modules() -> list[str]:
    return list(sys.modules)


def plugin_names(dask_scheduler) -> list[str]:
    return list(dask_scheduler.plugins)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A scheduler with the preload, and a worker that alone can import the model."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "only_on_workers.py").write_text(MODEL)
    root = str(Path(__file__).parents[2])
    file = tmp_path / "scheduler.json"
    monkeypatch.setenv("PYTHONPATH", root)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(models)])}
    scheduler = [
        "dask",
        "scheduler",
        "--preload",
        "scheduler_plugins",
        "--port",
        "0",
        "--no-dashboard",
        "--scheduler-file",
        str(file),
    ]
    worker = [
        "dask",
        "worker",
        "--scheduler-file",
        str(file),
        "--no-dashboard",
        "--nthreads",
        "1",
        "--local-directory",
        str(tmp_path),
    ]
    with (
        popen(scheduler, terminate_timeout=60),
        popen(worker, env=environment, terminate_timeout=60),
    ):
        with Client(scheduler_file=str(file), timeout="60s") as client:
            yield client


def test_a_scheduler_with_the_preload_serves(cluster):
    assert "daskinfer" in cluster.run_on_scheduler(plugin_names)
    model = daskinfer.deploy(
        cluster, factory="only_on_workers:build", factory_kwargs={"factor": 3}
    )
    xs = [np.full((1, 4), i, "float32") for i in range(50)]
    for x, y in zip(xs, daskinfer.gather(model.map(xs)), strict=True):
        assert np.array_equal(y, 3 * x)
    # The scheduler has handed the inputs on unread.
    modules = cluster.run_on_scheduler(loaded_modules)
    assert "scheduler_plugins.inference" in modules
    assert "torch" not in modules
    assert "only_on_workers" not in modules
    # Registering it again, as deploy does, changes nothing.
    assert cluster.run_on_scheduler(plugin_names).count("daskinfer") == 1
    status = model.status()
    assert (status.requests, status.successes) == (50, 50)
