"""Simulated NPUs that break, or have no memory, under requests."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client, wait
from distributed.utils_test import gen_cluster, poll_for

import daskinfer
from daskinfer import (
    BatchPolicy,
    DeviceError,
    LocalCluster,
    OutOfDeviceMemory,
    RetryPolicy,
)
from tests.cluster.helpers import until
from tests.cluster.scheduling_helpers import deploy, engine, nothing_is_left

PATIENCE = 60
FATAL = "aclrtSynchronizeStream failed, error code is 507015"


class Fragile(torch.nn.Module):
    """Doubles; one value breaks the device, for as long as its process lives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x.cpu() == 13).any():
            import torch_npu

            torch_npu.simulator.fail_next("", FATAL, 1 << 30)
        return x * 2


class FragileWhileWarmed(torch.nn.Module):
    """Doubles; each file in a folder breaks the device once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for file in Path(self.folder).iterdir():
            # Another worker may be faster.
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
                break_npu()
                break
        return x * 2


def row(value: float) -> torch.Tensor:
    return torch.full((1, 4), float(value))


def break_npu() -> None:
    import torch_npu

    torch_npu.simulator.fail_next("", FATAL, 1 << 30)


def pids(client: Client) -> set[int]:
    return set(client.run(os.getpid).values())


def ready_workers(model: Any) -> list[str]:
    return [w.address for w in model.status().workers if w.state == "ready"]


@pytest.fixture
def client(cleanup):
    with (
        LocalCluster(dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def deploy_on_both(client: Client, net: Any, **options: Any) -> Any:
    model = daskinfer.deploy(client, net, wait_timeout=PATIENCE, **options)
    poll_for(lambda: len(ready_workers(model)) == 2, PATIENCE)
    return model


def test_a_process_whose_device_broke_is_replaced(client):
    model = deploy_on_both(client, Fragile(), name="fragile", warmup=row(0))
    broken, other = ready_workers(model)
    # A result that is nowhere else, to be moved before the process ends.
    kept = model.options(workers=[broken]).submit(row(1))
    wait([kept])
    before = pids(client)
    client.run(break_npu, workers=[broken])
    futures = [
        *model.options(workers=[broken], allow_other_workers=True).map(
            [row(i) for i in range(100, 110)]
        ),
        *client.map(model, [row(i) for i in range(110, 150)]),
    ]
    answers = client.gather(futures)
    assert [float(y[0, 0]) for y in answers] == [2.0 * i for i in range(100, 150)]
    poll_for(lambda: len(ready_workers(model)) == 2, PATIENCE)
    poll_for(lambda: len(client.scheduler_info(-1)["workers"]) == 2, PATIENCE)
    assert broken not in ready_workers(model) and other in ready_workers(model)
    assert len(pids(client) - before) == 1
    assert float(kept.result()[0, 0]) == 2.0
    # Not computed again.
    assert daskinfer.info(kept).worker == broken
    # The new process serves, once it has answered one request.
    (new,) = set(ready_workers(model)) - {other}
    (doubted,) = (w for w in model.status().workers if w.address == new)
    assert (doubted.breaker, doubted.healthy) == ("half-open", False)
    assert "its process is new" in doubted.reason and "507015" in doubted.reason
    there = model.options(workers=[new]).submit(row(3))
    assert float(there.result()[0, 0]) == 6.0
    assert daskinfer.info(there).worker == new
    status = model.status()
    assert [(w.breaker, w.healthy) for w in status.workers] == [("closed", True)] * 2
    assert (status.failures, status.waiting, status.in_flight) == (0, 0, 0)


def test_a_process_whose_device_broke_while_loading_is_replaced(client, tmp_path):
    other = deploy_on_both(client, torch.nn.Identity(), name="other", warmup=row(0))
    before = pids(client)
    # One worker at least sees it, and none so often that it is given up.
    for i in range(2):
        (tmp_path / str(i)).touch()
    model = deploy_on_both(
        client, FragileWhileWarmed(tmp_path), name="fragile", warmup=row(0)
    )
    assert not list(tmp_path.iterdir())
    assert pids(client) - before
    answers = client.gather(model.map([row(i) for i in range(20)]))
    assert [float(y[0, 0]) for y in answers] == [2.0 * i for i in range(20)]
    assert float(other(row(3))[0, 0]) == 3.0


def test_a_version_that_breaks_each_process_while_loading_is_given_up(client, tmp_path):
    other = deploy_on_both(client, torch.nn.Identity(), name="other", warmup=row(0))
    # Both workers break three times, and have nothing to break them after.
    for i in range(100):
        (tmp_path / str(i)).touch()
    model = daskinfer.deploy(
        client, FragileWhileWarmed(tmp_path), name="bad", warmup=row(0), wait=False
    )
    # Each process starts three times.
    poll_for(
        lambda: [w.state for w in model.status().workers] == ["failed"] * 2,
        3 * PATIENCE,
    )
    poll_for(lambda: len(ready_workers(other)) == 2, PATIENCE)
    for worker in model.status().workers:
        assert "broke 3 times while it was loaded there" in worker.reason
        assert "507015" in worker.reason
    assert "507015" in model.status().problem
    answers = client.gather(other.map([row(i) for i in range(20)]))
    assert [float(y[0, 0]) for y in answers] == [float(i) for i in range(20)]


def test_an_input_that_breaks_devices_ends_alone(client):
    policy = BatchPolicy(max_batch_size=16)
    model = deploy_on_both(
        client, Fragile(), name="fragile", warmup=row(0), batching=policy
    )
    futures = model.map([row(i) for i in range(6, 22)])
    wait(futures)
    for i, future in enumerate(futures):
        if i != 7:
            assert float(future.result()[0, 0]) == 2.0 * (i + 6)
    error = futures[7].exception()
    assert isinstance(error, DeviceError)
    assert "507015" in str(error)
    assert (error.key, error.name, error.version) == (futures[7].key, "fragile", "1")
    assert error.worker.startswith("tcp://")
    assert isinstance(pickle.loads(pickle.dumps(error)), DeviceError)
    assert model.status().failures == 1
    poll_for(lambda: len(ready_workers(model)) == 2, PATIENCE)
    assert float(model(row(1))[0, 0]) == 2.0


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_without_a_nanny_a_broken_device_is_out_of_service(c, s, a):
    model = await deploy(c, Fragile(), retry=RetryPolicy(max_attempts=1))
    other = await deploy(c, torch.nn.Identity(), name="other")
    break_npu()
    error = await model.submit(row(1)).exception()
    assert isinstance(error, DeviceError)
    for handle in (model, other):
        status = await handle.status()
        (worker,) = status.workers
        assert (worker.state, worker.healthy) == ("failed", False)
        assert "507015" in worker.reason and "no Nanny" in worker.reason
        assert "507015" in status.problem
    waiting = other.submit(row(2))
    await until(lambda: len(engine(s).dispatcher.lines["other", "1"].queue) == 1)
    assert a.address in s.workers
    assert not engine(s).dispatcher.running.batches
    del waiting, error
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_batch_that_comes_to_a_broken_device_comes_back_uncharged(c, s, a):
    model = await deploy(c, Fragile())
    # As when a version that broke it was undeployed before it could be reported.
    a.plugins["daskinfer-runtime"].device.broken = RuntimeError(FATAL)
    future = model.submit(row(1))
    line = engine(s).dispatcher.lines["m", "1"]
    await until(lambda: len(line.queue) == 1 and not line.devices)
    (request,) = engine(s).requests.values()
    assert (request.charges, request.bystander, line.in_flight) == (0, 0, 0)
    assert "507015" in (await model.status()).problem
    del future, request
    await nothing_is_left(s, a)


class Wide(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # 1,024 numbers of a row become 16 MiB.
        return x.repeat(1, 4096).sum(1, keepdim=True)


def limit(mebibytes: int) -> None:
    import torch_npu

    torch_npu.simulator.set_limit(0, mebibytes << 20)


def test_what_does_not_fit_alone_says_so_and_costs_no_process(client):
    model = deploy_on_both(
        client, Wide(), name="wide", warmup=torch.ones(1, 64), batching=BatchPolicy(4)
    )
    before = pids(client)
    client.run(limit, 8)
    small = model.map([torch.full((1, 64), float(i)) for i in range(8)])
    large = model.submit(torch.ones(1, 1024))
    error = large.exception()
    assert isinstance(error, OutOfDeviceMemory)
    assert "make its input smaller" in str(error) and "out of memory" in str(error)
    assert (error.key, error.name, error.version) == (large.key, "wide", "1")
    assert error.worker in client.scheduler_info(-1)["workers"]
    assert [float(y[0, 0]) for y in client.gather(small)] == [
        64.0 * 4096 * i for i in range(8)
    ]
    assert pids(client) == before


def test_a_process_that_has_lost_the_devices_memory_is_replaced(client):
    x = torch.ones(1, 1024)
    model = deploy_on_both(
        client, Wide(), name="wide", warmup=x, batching=BatchPolicy(4)
    )
    lost, other = ready_workers(model)
    client.run(limit, 8, workers=[lost])
    futures = model.options(workers=[lost], allow_other_workers=True).map([x] * 8)
    assert [float(y[0, 0]) for y in client.gather(futures)] == [1024.0 * 4096] * 8
    poll_for(lambda: len(ready_workers(model)) == 2, PATIENCE)
    assert lost not in ready_workers(model) and other in ready_workers(model)
    assert model.status().failures == 0


class Hungry(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # 1 MiB a row, until the end of the pass.
        workspace = torch.empty(len(x), 1 << 18, device=x.device)
        return x * 2 if len(workspace) else x


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_the_warm_up_ends_where_memory_does(c, s, a):
    limit(16)
    model = await deploy(c, Hungry(), max_batch_size=64, warmup=torch.ones(1, 4))
    (version,) = (await model.status()).versions
    measured = [rows for rows, *_ in version.latency["npu/Ascend910B1"]]
    assert measured == [1, 2, 4, 8]
    answers = await c.gather(model.map([torch.full((1, 4), i) for i in range(64)]))
    assert [float(y[0, 0]) for y in answers] == [2.0 * i for i in range(64)]
    # Not even one row.
    limit(1)
    with pytest.raises(torch.OutOfMemoryError):
        await deploy(c, Hungry(), name="n", warmup=torch.ones(1, 4))


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_what_cannot_fit_is_not_tried(c, s, a):
    import torch_npu

    simulator = torch_npu.simulator
    model = await deploy(c, Hungry(), max_batch_size=64)
    for rows in (1, 2):
        await model.submit(torch.ones(rows, 4))
    limit(16)
    large = await model.submit(torch.ones(64, 4))
    assert torch.equal(large, torch.full((64, 4), 2.0))
    # Nothing ran out of it, and more is not sent at once again.
    assert simulator.counters(0)["out_of_memory"] == 0
    latency = engine(s).dispatcher.lines["m", "1"].latency
    assert latency.ceiling("npu/Ascend910B1") in (4, 8)
