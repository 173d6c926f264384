"""``dask ssh`` with our worker module on two hosts, which are this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from distributed import Client, Scheduler

import daskinfer
from tests.ssh.hosts import PATIENCE, dask_ssh, hosts, wait_until_empty

pytestmark = pytest.mark.process


#: Of the first host, for what no option of ``dask ssh`` can say.
CONFIGURATION = """
distributed: {scheduler: {preload: [scheduler_plugins]}}
daskinfer: {deployments: {digits: {factory: "daskinfer.demo.digits:load_model"}}}
"""


class Slow(torch.nn.Linear):
    """As on devices that are busy for long: while a host is killed, it has batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(x)


@pytest.fixture
def two_hosts(tmp_path):
    file = tmp_path / "dask.yaml"
    file.write_text(CONFIGURATION)
    with hosts(tmp_path, one={"DASK_CONFIG": str(file)}, two={}) as started:
        yield started


def test_a_host_is_lost_and_every_request_is_answered(two_hosts, tmp_path, loop):
    net = Slow(8, 4).eval()
    inputs = np.random.default_rng(0).normal(size=(1000, 1, 8)).astype("float32")
    expected = net(torch.from_numpy(inputs)).detach().numpy()
    one, two = two_hosts
    with dask_ssh(two_hosts, tmp_path) as address:
        with Client(address, timeout=PATIENCE, loop=loop) as client:
            client.wait_for_workers(2 * workers_of_a_host(), timeout=PATIENCE)
            # Before a client of ours brings it.
            assert "daskinfer" in client.run_on_scheduler(plugin_names)
            digits = daskinfer.get(client, "digits")
            assert digits(np.zeros((1, 1, 8, 8), "float32")).shape == (1, 10)
            model = daskinfer.deploy(
                client, net, name="net", batching=daskinfer.BatchPolicy(8)
            )
            status = model.status()
            assert {worker.state for worker in status.workers} == {"ready"}
            at = sorted({w.address.split(":")[1] for w in status.workers})
            assert at == [f"//{host.address}" for host in two_hosts]
            assert len(one.workers()) == len(two.workers()) == workers_of_a_host()

            futures = model.map(list(inputs[:500]))
            until(lambda: client.run_on_scheduler(in_flight, two.address) > 0)
            for process in two.processes("python"):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            futures += model.map(list(inputs[500:]))
            answers = np.stack(daskinfer.gather(futures))
            np.testing.assert_allclose(answers, expected, atol=1e-6)
            status = model.status()
            assert (status.failures, status.waiting, status.in_flight) == (0, 0, 0)
            # Those that it had were run again.
            assert client.run_on_scheduler(interrupted) > 0
            assert {w.address.split(":")[1] for w in status.workers} == {
                f"//{one.address}"
            }
    wait_until_empty(two_hosts)


def plugin_names(dask_scheduler: Scheduler) -> list[str]:
    return list(dask_scheduler.plugins)


def in_flight(address: str, dask_scheduler: Scheduler) -> int:
    """Requests of the batches that the workers of a host have."""
    engine: Any = dask_scheduler.plugins["daskinfer"]
    batches = engine.dispatcher.running.batches.values()
    return sum(
        len(batch.requests) for batch in batches if f"//{address}:" in batch.device.name
    )


def interrupted(dask_scheduler: Scheduler) -> int:
    """Attempts that ended with their worker."""
    engine: Any = dask_scheduler.plugins["daskinfer"]
    line = engine.dispatcher.lines["net", "1"]
    return int(line.figures.measures.interrupted["worker_lost"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "nothing is in flight"


def workers_of_a_host() -> int:
    from dask.system import CPU_COUNT
    from distributed.deploy.utils import nprocesses_nthreads

    return nprocesses_nthreads(CPU_COUNT)[0]
