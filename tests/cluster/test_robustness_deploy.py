"""Deploying, undeploying and deploying again faster than workers load."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine


@pytest.mark.parametrize("same", [True, False], ids=["same model", "another model"])
def test_a_report_of_a_load_that_nobody_wants_any_more(same: bool) -> None:
    @gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        reports: list[dict[str, Any]] = []
        old, new = Probe(), Probe(lambda x: x * 3, is_open=False)
        first = await deploy(client, old)
        plugin = engine(scheduler)
        handle = scheduler.stream_handlers["daskinfer-loaded"]

        def hold(**message: Any) -> None:
            reports.append(message)

        # The report of a second load is still on its way ...
        await first.undeploy()
        scheduler.stream_handlers["daskinfer-loaded"] = hold
        second = await deploy(client, old, wait=False)
        await until(lambda: bool(reports))
        scheduler.stream_handlers["daskinfer-loaded"] = handle
        await second.undeploy()
        # ... when the name is given to a third, which takes its time to warm up.
        probe = old if same else new
        old.close()
        third = asyncio.ensure_future(deploy(client, probe, warmup=ONE))
        await until(lambda: "m" in plugin.registry.deployments)
        handle(**reports[0])
        replica = plugin.registry.version("m").replicas[worker.address]
        assert replica.state in ("loading", "warming")
        probe.open()
        model = await third
        assert (await model.submit(ONE) == (2 if same else 3)).all()

    test()
