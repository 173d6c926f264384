"""Figures for Prometheus that say why: batches, breakers, caches and streams."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from distributed import wait
from distributed.metrics import monotonic
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import BatchTimeout, BreakerPolicy, RetryPolicy, StreamPolicy
from daskinfer.cache.policy import TierPolicy
from daskinfer.caching import CachePolicy
from tests.cluster.cache_helpers import cache_of, until_stored
from tests.cluster.helpers import Probe, until
from tests.cluster.http_helpers import ends, scrape
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left
from tests.cluster.stream_helpers import Feed, read

pytest.importorskip("prometheus_client")

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2


def row(value: float, columns: int = 1) -> np.ndarray:
    return np.full((1, columns), float(value))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_why_batches_were_sent_and_what_was_added(c, s, a):
    async def sent(model: Any) -> dict[str, float]:
        figures = await scrape(s)
        return figures.by("reason", "batches_sent_total", deployment=model.name)

    # Nothing is gained by waiting for more, and nobody is there: the device is idle.
    slow = Probe(lambda x: threading.Event().wait(0.003) or x)
    idle = await deploy(c, slow, "idle", max_batch_size=8, warmup=ONE)
    await idle.submit(row(1))
    assert await sent(idle) == {"idle": 1}

    # More is not allowed in a batch than waits, on the idle device too.
    full = await deploy(c, Probe(), "full", max_batch_size=1, warmup=ONE)
    await wait(full.map([row(i) for i in range(5)]))
    assert await sent(full) == {"full": 5}

    held = await deploy(
        c, Probe(), "held", min_batch_size=4, max_wait="5ms", warmup=ONE
    )
    await held.submit(row(1))
    assert await sent(held) == {"timeout": 1}

    padded = await deploy(c, Probe(), "padded", allowed_batch_sizes=[4], warmup=ONE)
    await padded.submit(row(1))
    figures = await scrape(s)
    assert figures.by("deployment", "padded_rows_total") == {"padded": 3}
    assert figures("rows_total", deployment="padded") == 1


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_breaker_that_opens_and_closes(c, s, a):
    probe = Probe()
    model = await deploy(
        c,
        probe,
        warmup=ONE,
        batch_timeout="50ms",
        retry=RetryPolicy(max_attempts=1),
        breaker=BreakerPolicy(cooldown="1h", max_cooldown="1h"),
    )
    about = {"deployment": "m", "version": "1", "worker": a.address}

    async def state() -> float:
        [breaker] = (await scrape(s)).matching("breaker_state", **about)
        return float(breaker.value)

    assert await state() == 0
    probe.close()
    assert isinstance(await model.submit(ONE).exception(), BatchTimeout)
    assert await state() == 2
    figures = await scrape(s)
    assert figures("breaker_openings_total", deployment="m", version="1") == 1
    assert ends(figures) == {("failed", "batch_timeout"): 1}
    interrupted = figures.by("reason", "attempts_interrupted_total", deployment="m")
    assert interrupted == {"batch_timeout": 1}
    # The device is free again, and the time has come to try it.
    probe.open()
    line = engine(s).dispatcher.lines["m", "1"]
    await until(lambda: not line.devices[a.address].stuck)
    assert await state() == 2
    line.health.breakers[a.address]._until = monotonic()
    assert await state() == 1
    await model.submit(ONE)
    assert await state() == 0
    figures = await scrape(s)
    assert figures("breaker_openings_total") == 1
    assert ends(figures)["answered", "computed"] == 1
    # One request, to see whether it is well.
    assert figures.by("reason", "batches_sent_total")["try"] == 1


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_cache_that_misses_and_makes_room(c, s, a):
    # For one result, not for two.
    small = CachePolicy(host=TierPolicy(12_000), packed=None, disk=None)
    model = await deploy(c, Probe(), max_batch_size=1, warmup=ONE, cache=small)
    await model.submit(row(1, 1000))
    await until_stored(a)
    for value in (1, 2, 1):
        await model.submit(row(value, 1000))
        await until(lambda: not len(cache_of(a).pending))
    figures = await scrape(a)
    about = {"deployment": "m", "worker": a.address, "tier": "host"}
    found = {
        name: figures(f"cache_{name}", **about)
        for name in ("hits_total", "misses_total", "evictions_total", "entries")
    }
    assert found == {
        "hits_total": 1,
        "misses_total": 3,
        "evictions_total": 2,
        "entries": 1,
    }
    told = ends(await scrape(s))
    assert told == {("answered", "computed"): 3, ("answered", "cached"): 1}


class Breaks(Feed):
    """Goes on to give chunks, unless it is to fail, or to break the device."""

    def __call__(self, says: str = "") -> Any:
        for number in super().__call__():
            if number == 2 and says:
                raise RuntimeError(says)
            yield number


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_how_streams_end(c, s, a, monkeypatch):
    def ended(figures: Any, name: str = "m") -> dict[str, float]:
        return figures.by("outcome", "streams_total", deployment=name, version="1")

    feed = Breaks(is_open=True)
    model = await deploy(c, feed, retry=RetryPolicy(max_attempts=1))
    device = a.plugins["daskinfer-runtime"].loader.find("m", "1").device
    monkeypatch.setattr(type(device), "is_fatal", lambda self, e: "is gone" in str(e))

    stopped = model.stream()
    assert await anext(stopped) == 0
    figures = await scrape(s)
    assert figures("live_streams", deployment="m", version="1") == 1
    assert figures("in_flight_requests") == 1 and ended(figures) == {}
    stopped.close()
    await until(lambda: feed.closed == 1)
    await nothing_is_left(s, a)
    figures = await scrape(s)
    assert figures("live_streams") == figures("in_flight_requests") == 0
    assert ended(figures) == {"stopped": 1}
    assert ends(figures) == {("cancelled", "released"): 1}

    with pytest.raises(RuntimeError, match="no good"):
        await read(model.stream("no good"))
    figures = await scrape(s)
    assert ended(figures) == {"stopped": 1, "failed": 1}
    assert ends(figures)["failed", "model"] == 1

    late = Feed(length=2)
    policy = StreamPolicy(idle_timeout="100ms")
    other = await deploy(c, late, "n", streaming=policy)
    late.let(3)
    assert await read(other.stream()) == [0, 1]
    figures = await scrape(s)
    assert ended(figures, "n") == {"ended": 1}
    assert ends(figures, deployment="n") == {("answered", "computed"): 1}
    assert figures("stream_chunks_total", deployment="n") == 2
    assert figures("stream_bytes_total", deployment="n") > 0
    assert figures("stream_first_chunk_seconds_count", deployment="n") == 1
    late.let()
    with pytest.raises(daskinfer.StreamStalled):
        await read(other.stream())
    figures = await scrape(s)
    assert ended(figures, "n") == {"ended": 1, "failed": 1}
    assert ends(figures, deployment="n")["failed", "stream_stalled"] == 1
    late.let()
    await until(lambda: late.closed == 1)

    # At last: nothing runs on this worker any more.
    with pytest.raises(daskinfer.DeviceError):
        await read(model.stream("the device is gone"))
    figures = await scrape(s)
    assert ended(figures) == {"stopped": 1, "failed": 1, "interrupted": 1}
    assert ends(figures, deployment="m")["failed", "device_error"] == 1
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_does_not_fit_and_what_breaks_the_device(c, s, a, monkeypatch):
    def answer(x: np.ndarray) -> np.ndarray:
        if (x == 7).any():
            raise MemoryError("no room for that")
        if (x == 8).any():
            raise RuntimeError("the device is gone")
        return x

    model = await deploy(c, Probe(answer), retry=RetryPolicy(max_attempts=1))
    device = a.plugins["daskinfer-runtime"].loader.find("m", "1").device
    monkeypatch.setattr(type(device), "is_fatal", lambda self, e: "is gone" in str(e))
    with pytest.raises(daskinfer.OutOfDeviceMemory):
        await model.submit(row(7))
    await model.submit(row(1))
    figures = await scrape(s)
    expected = {("failed", "out_of_memory"): 1, ("answered", "computed"): 1}
    assert ends(figures) == expected
    # The device is well: nothing was interrupted, and nothing opened.
    assert figures("attempts_interrupted_total") == 0
    assert figures("breaker_openings_total") == 0

    with pytest.raises(daskinfer.DeviceError):
        await model.submit(row(8))
    figures = await scrape(s)
    assert ends(figures) == expected | {("failed", "device_error"): 1}
    interrupted = figures.by("reason", "attempts_interrupted_total", deployment="m")
    assert interrupted == {"device_error": 1}


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_batches_that_are_sent_early_or_to_where_the_results_are(c, s, a, b):
    async def sent(model: Any) -> dict[str, float]:
        figures = await scrape(s)
        return figures.by("reason", "batches_sent_total", deployment=model.name)

    # Long enough for the second to come while the first is not late.
    probe = Probe(lambda x: threading.Event().wait(0.3) or x)
    ahead = await deploy(c, probe, "ahead", max_batch_size=8, warmup=ONE)
    probe.close()
    here = ahead.options(workers=a.address)
    futures = [here.submit(row(1))]
    await until(lambda: len(engine(s).dispatcher.running.batches) == 1)
    # The next is on its way before the device has ended the first.
    futures.append(here.submit(row(2)))
    await until(lambda: len(engine(s).dispatcher.running.batches) == 2)
    assert await sent(ahead) == {"idle": 1, "prefetch": 1}
    probe.open()
    await wait(futures)
    await ahead.undeploy()

    probe = Probe()
    kept = await deploy(c, probe, "kept", cache=CachePolicy())
    first = kept.submit(row(1))
    await first
    home = (await daskinfer.info(first)).worker
    await until(lambda: len(engine(s).dispatcher.affinity.residency) == 1)
    # Where the result is, the device is busy.
    probe.close()
    busy = kept.options(workers=home).submit(row(0))
    await probe.entered(2)
    assert "cached" not in await sent(kept)
    for _ in range(3):
        await kept.submit(row(1))
    assert (await sent(kept))["cached"] == 3
    probe.open()
    await busy
