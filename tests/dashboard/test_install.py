"""Where the pages are, and where there are none."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
from distributed import Client, Scheduler
from distributed.utils_test import gen_cluster, gen_test
from tornado.httpclient import AsyncHTTPClient, HTTPResponse

import daskinfer
from scheduler_plugins import InferencePlugin, dask_setup
from scheduler_plugins.dashboard import installing
from scheduler_plugins.dashboard.page import PARTS
from tests.cluster.helpers import Probe

WITH = {"dashboard": True}
PATHS = [
    "inference",
    *(f"individual-inference-{part.name}" for part in PARTS),
]


async def get(scheduler: Any, path: str) -> HTTPResponse:
    url = f"http://localhost:{scheduler.http_server.port}/{path}"
    return await AsyncHTTPClient().fetch(url, raise_error=False)


def scheduler_with(**kwargs: Any) -> Scheduler:
    return Scheduler(
        host="127.0.0.1", port=0, dashboard_address="localhost:0", **kwargs
    )


@pytest.mark.smoke
@gen_cluster(nthreads=[], scheduler_kwargs=WITH)
async def test_every_page_is_there_and_linked(scheduler: Any) -> None:
    await dask_setup(scheduler)
    status = await get(scheduler, "status")
    linked = status.body.decode()
    for path in PATHS:
        assert (await get(scheduler, path)).code == 200, path
        assert linked.count(f'href="{path}"') == 1, path


@gen_cluster(client=True, nthreads=[("", 1)], scheduler_kwargs=WITH)
async def test_a_plugin_that_comes_later_brings_the_page(
    client: Client, scheduler: Any, worker: Any
) -> None:
    assert (await get(scheduler, "inference")).code == 404
    model = await daskinfer.deploy(client, Probe())
    assert (await get(scheduler, "inference")).code == 200
    assert 'href="inference"' in (await get(scheduler, "status")).body.decode()
    await model.submit(np.ones((1, 2)))


@gen_cluster(nthreads=[], scheduler_kwargs=WITH)
async def test_a_second_plugin_adds_nothing(scheduler: Any) -> None:
    await dask_setup(scheduler)
    before = list(scheduler.http_application.applications)
    await dask_setup(scheduler)
    assert scheduler.http_application.applications == before


@gen_cluster(nthreads=[], scheduler_kwargs={**WITH, "http_prefix": "/proxy/dask"})
async def test_behind_a_prefix(scheduler: Any) -> None:
    await dask_setup(scheduler)
    for path in PATHS:
        assert (await get(scheduler, f"proxy/dask/{path}")).code == 200, path
    assert (await get(scheduler, "inference")).code == 404


@gen_cluster(nthreads=[], scheduler_kwargs={"dashboard": False})
async def test_a_scheduler_without_a_dashboard(scheduler: Any) -> None:
    await dask_setup(scheduler)
    assert len(scheduler.http_application.applications) == 0
    assert (await get(scheduler, "inference")).code == 404


@gen_cluster(nthreads=[], scheduler_kwargs=WITH)
async def test_nothing_is_read_before_somebody_looks(scheduler: Any) -> None:
    await dask_setup(scheduler)
    feed = scheduler.plugins["daskinfer"].dashboard
    assert feed.at == float("-inf")
    await get(scheduler, "inference")
    assert feed.at > float("-inf")


@gen_test()
async def test_it_ends_with_its_scheduler() -> None:
    async with scheduler_with(dashboard=True) as scheduler:
        await dask_setup(scheduler)
        feed = scheduler.plugins["daskinfer"].dashboard
        with mock.patch.object(feed, "close", wraps=feed.close) as close:
            await scheduler.close()
        close.assert_called_once()


@gen_test()
async def test_models_are_served_where_the_page_cannot_be_added(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = mock.patch.object(
        installing, "template_variables", side_effect=KeyError("pages")
    )
    async with scheduler_with(dashboard=True) as scheduler:
        with broken, caplog.at_level(logging.ERROR, "distributed.inference"):
            await dask_setup(scheduler)
        assert isinstance(scheduler.plugins["daskinfer"], InferencePlugin)
        assert scheduler.plugins["daskinfer"].dashboard is None
        assert "could not be given its page" in caplog.text
        assert (await get(scheduler, "status")).code == 200


_WITHOUT_BOKEH = """
import asyncio, sys, warnings
sys.modules["bokeh"] = None
import distributed
from scheduler_plugins import dask_setup

async def main():
    async with distributed.Scheduler(
        host="127.0.0.1", port=0, dashboard=True, dashboard_address=":0"
    ) as scheduler:
        await dask_setup(scheduler)
        assert scheduler.plugins["daskinfer"].dashboard is None

asyncio.run(main())
"""


def test_a_scheduler_without_bokeh() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT_BOKEH],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert "distributed.inference" not in ran.stderr
    assert "Traceback" not in ran.stderr
