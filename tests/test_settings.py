"""The strict settings of conftest.py reach every kind of cluster."""

from __future__ import annotations

from typing import Any

import dask.config
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker
from distributed.utils_test import gen_cluster


def validates(dask_worker: Worker) -> bool:
    return bool(dask_worker.state.validate)


@gen_cluster(client=True)
async def test_cluster_in_this_loop(
    client: Client, scheduler: Scheduler, *workers: Worker
) -> None:
    assert scheduler.validate
    assert all(validates(worker) for worker in workers)


@gen_cluster()
async def test_defaults_are_there(*_: Any) -> None:
    # gen_cluster goes back to the configuration that it noted.
    assert dask.config.get("daskinfer.placement") == "least-loaded"


@pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.process)]
)
def test_local_cluster(processes: bool) -> None:
    with (
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=processes,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        assert cluster.scheduler.validate
        assert list(client.run(validates).values()) == [True]
