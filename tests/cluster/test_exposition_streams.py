"""Figures of streams for Prometheus: how fast their chunks come."""

from __future__ import annotations

from time import perf_counter

import pytest
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import until
from tests.cluster.http_helpers import scrape
from tests.cluster.scheduling_helpers import deploy
from tests.cluster.stream_helpers import Feed, read

pytest.importorskip("prometheus_client")

ABOUT = {"deployment": "m", "version": "1"}


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_seconds_to_the_first_chunk_and_between_chunks(c, s, a):
    feed = Feed(length=3)
    model = await deploy(c, feed)
    sent = perf_counter()
    stream = model.stream()
    await until(lambda: feed.begun == 1)
    begun = perf_counter()
    let, come = [], []
    for _ in range(3):
        since = perf_counter()
        # Longer than what a message takes to come.
        await until(lambda since=since: perf_counter() - since > 0.05)
        let.append(perf_counter())
        feed.let()
        await anext(stream)
        come.append(perf_counter())
    feed.let()
    assert await read(stream) == []
    figures = await scrape(s)

    def measured(what: str) -> tuple[float, float]:
        name = f"stream_{what}_seconds"
        count = figures(f"{name}_count", **ABOUT)
        assert figures(f"{name}_bucket", le="+Inf", **ABOUT) == count
        return count, figures(f"{name}_sum", **ABOUT)

    count, seconds = measured("first_chunk")
    assert count == 1
    assert let[0] - begun <= seconds <= come[0] - sent
    count, seconds = measured("between_chunks")
    assert count == 2
    assert let[2] - come[1] + let[1] - come[0] <= seconds <= come[2] - let[0]
