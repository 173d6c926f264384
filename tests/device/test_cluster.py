"""LocalCluster, with the processes it really starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import dask
import pytest
from dask.system import CPU_COUNT
from distributed import Client, Nanny, Scheduler, Status, Worker
from distributed.utils_test import async_poll_for, poll_for

from daskinfer.cluster import LocalCluster
from daskinfer.device import DeviceNotFound
from daskinfer.device_nanny import DeviceNanny

ROOT = Path(__file__).parents[2]
PATIENCE = 60

pytestmark = pytest.mark.process

VARIABLES = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)


def environment(dask_worker: Worker) -> dict[str, str | None]:
    found = {name: os.environ.get(name) for name in VARIABLES}
    return {**found, "pid": str(os.getpid()), "extra": os.environ.get("EXTRA")}


def workers(cluster: LocalCluster) -> list[str]:
    return list(cluster.scheduler_info["workers"])


def resources(client: Client) -> list[dict[str, float]]:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return [worker["resources"] for worker in workers.values()]


@pytest.fixture
def clean_threads(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_without_accelerators_the_workers_share_the_cores(
    cleanup, bare_host, clean_threads
):
    with (
        LocalCluster(dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        seen = client.run(environment)
        assert resources(client) == [{} for _ in seen]
    threads = [int(found["OMP_NUM_THREADS"]) for found in seen.values()]
    assert sum(threads) <= CPU_COUNT
    assert len({found["pid"] for found in seen.values()}) == len(seen)
    assert {found["CUDA_VISIBLE_DEVICES"] for found in seen.values()} == {""}


def test_each_worker_has_one_device_and_says_so(cleanup, two_npus):
    with (
        LocalCluster(dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        seen = client.run(environment)
        assert resources(client) == [{"NPU": 1.0}, {"NPU": 1.0}]
        devices = sorted(found["ASCEND_RT_VISIBLE_DEVICES"] for found in seen.values())
        assert devices == ["0", "1"]

        client.restart()
        again = client.run(environment)
        devices = sorted(found["ASCEND_RT_VISIBLE_DEVICES"] for found in again.values())
        assert devices == ["0", "1"]
        assert not {found["pid"] for found in again.values()} & {
            found["pid"] for found in seen.values()
        }


def test_scaling_gives_back_and_takes_devices(cleanup, two_npus):
    async def scale() -> list[str]:
        async with LocalCluster(asynchronous=True, dashboard_address=":0") as cluster:
            async with Client(cluster, asynchronous=True) as client:
                await cluster.scale_down([0])
                cluster.scale(2)
                await cluster
                await client.wait_for_workers(2)
                with pytest.raises(ValueError, match="has 2 devices, each"):
                    cluster.scale(3)
                seen = await client.run(environment)
        return sorted(found["ASCEND_RT_VISIBLE_DEVICES"] for found in seen.values())

    assert asyncio.run(scale()) == ["0", "1"]


def test_it_never_adapts_beyond_the_devices(cleanup, two_npus):
    async def limits() -> list[int]:
        async with LocalCluster(
            0, asynchronous=True, dashboard_address=":0"
        ) as cluster:
            with pytest.raises(ValueError, match=r"minimum=3 is too many.*2 devices"):
                cluster.adapt(minimum=3)
            return [
                cluster.adapt(minimum=1, **given, interval="1h").maximum
                for given in ({}, {"maximum": 1}, {"maximum": 9})
            ]

    # What was given once holds until it is given anew, as always with Dask.
    assert asyncio.run(limits()) == [2, 1, 2]


def test_one_certain_device(cleanup, two_npus):
    with LocalCluster(device="npu:1", dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            [found] = client.run(environment).values()
    assert found["ASCEND_RT_VISIBLE_DEVICES"] == "1"


def test_the_environment_of_this_process_stays_as_it_was(cleanup, two_npus):
    before = dict(os.environ)
    with LocalCluster(dashboard_address=":0", env={"EXTRA": "1"}) as cluster:
        with Client(cluster) as client:
            seen = client.run(environment)
            during = dict(os.environ)
    for changed in (during, dict(os.environ)):
        # Dask's own mark, and pytest's.
        for name in ("__DASK_PARENT_PID", "PYTEST_CURRENT_TEST"):
            changed.pop(name, None)
            before.pop(name, None)
        assert changed == before
    assert {found["extra"] for found in seen.values()} == {"1"}


def test_what_the_user_says_goes_to_dask_and_wins(cleanup, two_npus):
    with LocalCluster(
        n_workers=1,
        threads_per_worker=3,
        resources={"NPU": 2, "disk": 5},
        env={"OMP_NUM_THREADS": "1", "ASCEND_RT_VISIBLE_DEVICES": "7"},
        memory_limit="1 GiB",
        name="mine",
        dashboard_address=":0",
    ) as cluster:
        assert cluster.name == "mine"
        assert cluster.dashboard_link.startswith("http")
        with Client(cluster) as client:
            [found] = client.run(environment).values()
            [worker] = client.scheduler_info()["workers"].values()
    assert found["ASCEND_RT_VISIBLE_DEVICES"] == "7"
    assert found["OMP_NUM_THREADS"] == "1"
    assert worker["nthreads"] == 3
    assert worker["resources"] == {"NPU": 2, "disk": 5}
    assert worker["memory_limit"] == 2**30


def test_a_wish_for_fewer_threads_is_respected(cleanup, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with LocalCluster(n_workers=1, device="cpu", dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            [found] = client.run(environment).values()
    assert found["MKL_NUM_THREADS"] == "1"


def test_all_in_one_process(cleanup, bare_host):
    async def run() -> int:
        async with LocalCluster(
            n_workers=2,
            processes=False,
            asynchronous=True,
            dashboard_address=":0",
        ) as cluster:
            async with Client(cluster, asynchronous=True) as client:
                seen = await client.run(environment)
                assert all(isinstance(w, Worker) for w in cluster.workers.values())
        assert {found["pid"] for found in seen.values()} == {str(os.getpid())}
        return len(seen)

    assert asyncio.run(run()) == 2


@mock.patch.dict(os.environ)  # Dask's own nanny leaves its settings behind here.
def test_who_starts_anew_is_waited_for_longer_than_dask_waits(cleanup, bare_host):
    """Whatever the time at which Dask looks for it."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10ms"}),
        LocalCluster(n_workers=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        seen = set()
        for _ in range(3):
            client.wait_for_workers(1, timeout=PATIENCE)
            ((address, pid),) = client.run(os.getpid).items()
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
            poll_for(lambda gone=address: gone not in workers(cluster), PATIENCE)
        client.wait_for_workers(1, timeout=PATIENCE)
        assert len(seen) == 3 and len(cluster.workers) == 1


def test_a_nanny_that_has_ended_is_not_waited_for(cleanup, bare_host):
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10ms"}),
        LocalCluster(n_workers=1, dashboard_address=":0") as cluster,
    ):
        poll_for(lambda: len(workers(cluster)) == 1, PATIENCE)
        (nanny,) = cluster.workers.values()
        cluster.sync(nanny.close)
        poll_for(lambda: not cluster.workers, PATIENCE)
        assert not workers(cluster)


def test_a_nanny_that_closes_starts_no_process_that_it_was_asked_for(cleanup):
    async def restart_and_close() -> None:
        async with Scheduler(host="127.0.0.1", dashboard_address=":0") as scheduler:
            nanny = await DeviceNanny(
                scheduler.address, nthreads=1, host="127.0.0.1", env={}
            )
            restarting = asyncio.ensure_future(nanny.restart())
            await async_poll_for(
                lambda: nanny.process.status == Status.stopping, PATIENCE, period=0
            )
            await nanny.close()
            assert await restarting == "OK"
            assert nanny.process is None

    asyncio.run(restart_and_close())


def test_another_nanny_gets_the_environment_too(cleanup, two_npus):
    with LocalCluster(
        n_workers=1, worker_class=Nanny, dashboard_address=":0"
    ) as cluster:
        with Client(cluster) as client:
            [found] = client.run(environment).values()
    assert found["ASCEND_RT_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_workers": -1}, "n_workers=-1 is negative"),
        ({"n_workers": 3}, "n_workers=3 is too many: device='auto' stands for 2"),
        ({"n_workers": 2, "processes": False}, "processes=False allows one worker"),
        ({"device": "npu:1", "processes": False}, "processes=False allows one worker"),
        ({"device": "gpu"}, "device='gpu' is unknown"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(two_npus, arguments, message):
    with pytest.raises(ValueError, match=message):
        LocalCluster(**arguments)


@pytest.mark.parametrize("device", ["npu", "cuda", "cuda:2"])
def test_a_missing_device_says_why(bare_host, device):
    with pytest.raises(DeviceNotFound, match=r"no (NPU|CUDA) in this test"):
        LocalCluster(device=device)


def test_a_script_that_imports_torch_first_gets_its_threads_and_device(tmp_path):
    # A worker process imports the main script again before Dask's own code runs.
    script = tmp_path / "script.py"
    script.write_text(
        """
import os
import torch

seen = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.get_num_threads()

if __name__ == "__main__":
    from distributed import Client
    from daskinfer.cluster import LocalCluster

    def look():
        import __mp_main__
        return __mp_main__.seen

    with LocalCluster(n_workers=1, device="cpu", dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            [found] = client.run(look).values()
    print(found)
"""
    )
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(CPU_COUNT),
    }
    # Nannies of other tests may have left theirs in this process.
    for name in ("CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        variables.pop(name, None)
    done = subprocess.run(
        [sys.executable, script],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"('', {CPU_COUNT})\n"
