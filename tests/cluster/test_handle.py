"""The handle is light, and the scheduler stays so."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Future
from distributed.protocol import deserialize, serialize
from distributed.utils_test import gen_cluster, popen

import daskinfer
from tests.cluster.helpers import PATIENCE, Probe, linear

ROOT = Path(__file__).parents[2]
X = np.ones((2, 4), "float32")

# A signal that meets a message on its way to the scheduler costs Dask's worker 30 s.
TIME_TO_END = 3 * PATIENCE


@gen_cluster(client=True)
async def test_few_bytes(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, linear(500, 500), name="a" * 20)
    assert len(pickle.dumps(model)) < 300
    header, frames = serialize(model)
    assert sum(map(len, frames)) < 400
    assert deserialize(header, frames) == model


@gen_cluster(client=True)
async def test_equality(client: Client, scheduler: Any, a: Any, b: Any) -> None:
    model = await daskinfer.deploy(client, Probe(), name="net")
    same, pinned = daskinfer.Model("net"), daskinfer.Model("net", "1")
    assert model == same and hash(model) == hash(same)
    assert model != pinned and model != daskinfer.Model("other")
    assert repr(model) == "<Model 'net'>"
    assert repr(pinned) == "<Model 'net' version '1'>"
    assert (
        repr(pinned.options(priority=2)) == "<Model 'net' version '1' with priority=2>"
    )


@gen_cluster(client=True)
async def test_keys_carry_the_name(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, Probe(), name="net")
    futures = [model.submit(X), client.submit(model, X), *client.map(model, [X])]
    await client.gather(futures)
    assert {scheduler.tasks[future.key].prefix.name for future in futures} == {"net"}
    assert all(isinstance(future, Future) for future in futures)


@gen_cluster(client=True)
async def test_sent_to_another_client(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = pickle.loads(pickle.dumps(await daskinfer.deploy(client, Probe())))
    assert model.client is client
    np.testing.assert_array_equal(await model.submit(X), X * 2)


def test_needs_no_torch() -> None:
    model = pickle.dumps(daskinfer.Model("net").options(priority=3).model)
    code = (
        "import pickle, sys, daskinfer, scheduler_plugins, daskinfer.submission\n"
        f"model = pickle.loads({model!r})\n"
        "daskinfer.BatchPolicy(), daskinfer.gather, model.options(retries=1)\n"
        "assert 'torch' not in sys.modules\n"
        "print(model)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.stdout.strip() == "<Model 'net'>", ended.stderr


USERS_MODULE = '''
import os
from dataclasses import dataclass

import torch


@dataclass
class Sample:
    """Writes down which processes unpickle it."""

    x: torch.Tensor
    log: str

    def __reduce__(self):
        return remake, (self.x, self.log)


def remake(x, log):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    return Sample(x, log)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, sample):
        return self.layer(sample.x)
'''


def python(path: Path | None) -> dict[str, str]:
    """The environment of a process that finds the project, and a folder of the user."""
    places = [str(ROOT)] + ([str(path)] if path else [])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    (tmp_path / "users_module.py").write_text(USERS_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("users_module", None)


@pytest.mark.process
def test_scheduler_imports_and_unpickles_nothing(users_folder: Path) -> None:
    """Real processes; the scheduler's does not even find the user's module."""
    contact = users_folder / "scheduler.json"
    common = ["--scheduler-file", str(contact), "--dashboard-address", ":0"]
    with (
        popen(
            ["dask", "scheduler", "--port", "0", "--interface", "lo", *common],
            env=python(None),
            terminate_timeout=TIME_TO_END,
        ),
        popen(
            ["dask", "worker", "--no-nanny", "--nthreads", "1", *common],
            env=python(users_folder),
            terminate_timeout=TIME_TO_END,
        ),
        Client(scheduler_file=str(contact), timeout=PATIENCE) as client,
    ):
        import torch
        import users_module  # type: ignore[import-not-found]

        net = users_module.Net()
        model = daskinfer.deploy(client, net)
        log = users_folder / "unpickled"
        sample = users_module.Sample(torch.ones(2, 4), str(log))
        futures = [model.submit(sample) for _ in range(3)]
        answers = daskinfer.gather(futures)
        assert all(torch.allclose(a, net(sample)) for a in answers)

        def about(dask_scheduler: Any) -> tuple[int, list[str]]:
            import os
            import sys

            return os.getpid(), sorted(sys.modules)

        pid, modules = client.run_on_scheduler(about)
        assert "scheduler_plugins.inference" in modules
        assert "torch" not in modules and "users_module" not in modules
        assert str(pid) not in log.read_text().split()
        (worker,) = client.run(os.getpid).values()
        assert set(log.read_text().split()) == {str(worker)}
