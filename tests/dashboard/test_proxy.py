"""The page behind a reverse proxy, as a browser shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from distributed import Client

import daskinfer
from tests.dashboard.browser import MARKS, Page
from tests.dashboard.serving import Sleeper, cluster, grows
from tests.ssh.hosts import free_port

pytestmark = MARKS

PREFIX = "/gateway/dask"


@contextmanager
def proxy(client: Client, *options: str) -> Iterator[str]:
    """Run a proxy before a cluster's dashboard, and give the address of that."""
    port = free_port("127.0.0.1")
    upstream = f"localhost:{client.cluster.scheduler.http_server.port}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.dashboard.proxy"),
            *(str(port), upstream, PREFIX, *options),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield f"http://localhost:{port}"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("prefix", [PREFIX, ""], ids=["kept", "stripped"])
def test_what_a_proxy_passes_on(page: Page, prefix: str) -> None:
    options = [] if prefix else ["STRIPPED"]
    with (
        cluster(page, 1, http_prefix=prefix or "/") as client,
        proxy(client, *options) as gateway,
    ):
        model = daskinfer.deploy(client, Sleeper(), name="resnet50")
        page.open(f"{gateway}{PREFIX}/inference?deployment=resnet50")
        assert page.columns("deployments")["requests"] == [0]
        assert page.value("deployment", "value") == "resnet50"
        for number in range(1, 4):
            model(np.full((1, 4), number, "float32"))
            page.until(lambda n=number: page.columns("deployments")["requests"] == [n])
        drawn = page.until(lambda: page.text("deployments-table"))
        grows(page, lambda: len(page.columns("requests")["at"]))
        assert "resnet50" in drawn
        assert page.driver.current_url.startswith(gateway)
        # Before the proxy ends.
        assert page.complaints() == []
        page.leave()
