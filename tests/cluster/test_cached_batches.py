"""Batches of deployments with a cache that wait, are late, cancelled or lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import CachePolicy, TierPolicy, payload
from daskinfer.cache import gate
from daskinfer.worker.result_cache import ResultCache
from tests.cluster.cache_helpers import cache_of, caches, until_stored
from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left
from tests.cluster.test_result_cache import (
    by_client,
    by_handle,
    linear,
    same,
    status,
)
from tests.cluster.test_waiting_batches import WITH_GPU, some_wait, time_passes

ALONE = [("127.0.0.1", 1)]
PAIR = [("127.0.0.1", 1)] * 2
WAYS: list[Callable[..., Any]] = [by_handle, by_client]
both_ways = pytest.mark.parametrize("send", WAYS)


class Block:
    """Holds back look-ups, or stores."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str) -> None:
        original = getattr(ResultCache, method)
        self._gate = threading.Event()
        self.entered = threading.Event()

        def wait(cache: ResultCache, *args: Any) -> Any:
            self.entered.set()
            assert self._gate.wait(PATIENCE)
            return original(cache, *args)

        patch.setattr(ResultCache, method, wait)

    def open(self) -> None:
        self._gate.set()


async def close_breakers(model: daskinfer.Model) -> bool:
    found = await model.status()
    return {worker.breaker for worker in found.workers} == {"closed"}


@both_ways
def test_a_hit_needs_no_device_that_a_task_has(send: Any) -> None:
    @gen_cluster(client=True, nthreads=WITH_GPU)
    async def test(c: Client, s: Scheduler, a: Worker) -> None:
        probe = Probe()
        model = await deploy(
            c, probe, device="cpu", resources={"GPU": 1}, cache=CachePolicy()
        )
        await model.submit(ONE)
        await until_stored(a)
        task = Probe(is_open=False)
        holder = c.submit(task, 1, resources={"GPU": 1})
        await task.entered()
        future = send(c, model, ONE)
        assert same(await future, 2 * ONE)
        assert (await daskinfer.info(future)).cached
        assert holder.status == "pending"
        task.open()
        await holder
        assert len(probe.calls) == 1

    test()


@gen_cluster(client=True, nthreads=WITH_GPU)
async def test_what_is_not_found_waits_for_the_device_without_being_late(
    c: Client, s: Scheduler, a: Worker
) -> None:
    probe = Probe()
    model = await deploy(
        c,
        probe,
        device="cpu",
        resources={"GPU": 1},
        batch_timeout="1s",
        cache=CachePolicy(),
        warmup=ONE,
    )
    probe.calls.clear()
    await model.submit(ONE)
    await until_stored(a)
    # Behind the scheduler's back, as if it had just been evicted.
    await caches(a).store(cache_of(a)._tiers.clear)
    task = Probe(is_open=False)
    holder = c.submit(task, 1, resources={"GPU": 1})
    await task.entered()
    futures = [model.submit(ONE), c.submit(model, ONE, pure=False)]
    await until(lambda: some_wait(s, 2))
    (device,) = engine(s).dispatcher.lines["m", "1"].devices.values()
    await until(lambda: not device.looked_up)
    await time_passes(model)
    assert await close_breakers(model)
    task.open()
    for future in futures:
        assert same(await future, 2 * ONE)
        assert (await daskinfer.info(future)).attempts == 1
    assert len(probe.calls) == 2, "the second found what the first had computed"
    await holder
    del holder, future, futures
    await nothing_is_left(s, a)


@both_ways
def test_slow_look_ups_use_up_no_batch_timeout(send: Any) -> None:
    @gen_cluster(client=True, nthreads=ALONE)
    async def test(c: Client, s: Scheduler, a: Worker) -> None:
        model = await deploy(
            c, Probe(), batch_timeout="1s", cache=CachePolicy(), warmup=ONE
        )
        plain = await deploy(c, Probe(), "plain", warmup=ONE)
        with pytest.MonkeyPatch.context() as patch:
            block = Block(patch, "get")
            try:
                future = send(c, model, ONE)
                await until(lambda: some_wait(s, 1))
                # Of another deployment, which the device serves meanwhile.
                assert same(await plain.submit(ONE), 2 * ONE)
                await time_passes(model)
                assert await close_breakers(model)
            finally:
                block.open()
            assert same(await future, 2 * ONE)
        about = await daskinfer.info(future)
        assert (about.attempts, about.cached) == (1, False)
        del future
        await nothing_is_left(s, a)

    test()


@both_ways
def test_who_waits_for_an_equal_request_outlives_its_owner(send: Any) -> None:
    """The first is cancelled while it runs; the second waited for it."""

    @gen_cluster(client=True, nthreads=ALONE)
    async def test(c: Client, s: Scheduler, a: Worker) -> None:
        probe = Probe()
        model = await deploy(
            c, probe, cache=CachePolicy(), max_batch_size=1, warmup=ONE
        )
        probe.calls.clear()
        probe.close()
        first = send(c, model, ONE)
        await probe.entered()
        second = send(c, model, ONE)
        runtime: Any = a.plugins["daskinfer-runtime"]
        await until(lambda: len(runtime.jobs) == 2)
        await first.cancel()
        probe.open()
        assert same(await second, 2 * ONE)
        del first, second
        await nothing_is_left(s, a)

    test()


@both_ways
def test_a_worker_lost_in_mid_flight_takes_no_equal_request_with_it(send: Any) -> None:
    @gen_cluster(client=True, nthreads=PAIR)
    async def test(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        probe = Probe(is_open=False)
        model = await deploy(c, probe, cache=CachePolicy(), max_batch_size=1)
        futures = [send(c, model, ONE) for _ in range(6)]
        await probe.entered(2)
        await a.close()
        probe.open()
        for future in futures:
            assert same(await future, 2 * ONE)
            about = await daskinfer.info(future)
            assert about.worker == b.address
        del future, futures
        await nothing_is_left(s, b)

    test()


@gen_cluster(client=True, nthreads=ALONE)
async def test_a_cancelled_request_gets_no_hit(
    c: Client, s: Scheduler, a: Worker
) -> None:
    probe = Probe()
    model = await deploy(c, probe, cache=CachePolicy())
    await model.submit(ONE)
    await until_stored(a)
    with pytest.MonkeyPatch.context() as patch:
        block = Block(patch, "get")
        try:
            gone, wanted = model.submit(ONE), model.submit(ONE)
            await until(block.entered.is_set)
            await gone.cancel()
            del gone
            await until(lambda: len(s.tasks) == 1)
            runtime: Any = a.plugins["daskinfer-runtime"]
            await until(lambda: any(job.dropped for job in runtime.jobs.values()))
        finally:
            block.open()
        assert same(await wanted, 2 * ONE)
    assert len(a.data) == 1
    del wanted
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ALONE)
async def test_what_is_under_way_when_a_cache_is_cleared_is_not_kept(
    c: Client, s: Scheduler, a: Worker
) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe, cache=CachePolicy(), max_batch_size=1)
    before = model.submit(ONE)
    await probe.entered()
    await model.cache_clear()
    after = model.submit(ONE)
    probe.open()
    for future in (before, after):
        assert same(await future, 2 * ONE)
        # Not even to each other.
        assert not (await daskinfer.info(future)).cached
    assert len(probe.calls) == 2


@gen_cluster(client=True, nthreads=PAIR)
async def test_results_too_large_for_every_tier_are_looked_for_nowhere(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    small = CachePolicy(host=TierPolicy(1000), packed=None, disk=None)
    model = await deploy(c, Probe(lambda x: np.repeat(x, 1000, 1)), cache=small)
    residency = engine(s).dispatcher.affinity.residency
    for _ in range(5):
        assert (await model.submit(ONE)).shape == (1, 1000)
        await until(lambda: not len(residency))
    found = (await status(model)).cache
    assert found is not None and found.results.dropped >= 1
    assert found.results["host"].entries == 0


@gen_cluster(client=True, nthreads=ALONE)
async def test_nothing_is_stored_while_memory_is_short(
    c: Client, s: Scheduler, a: Worker
) -> None:
    probe = Probe()
    model = await deploy(c, probe, cache=CachePolicy())
    await model.submit(ONE)
    await until_stored(a)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskinfer.worker.caching.excess_bytes", lambda *_: 10**9)
        await until(lambda: not cache_of(a).nbytes)
        await model.submit(ONE)
        await until(lambda: cache_of(a).counts["dropped"] == 1)
        assert not cache_of(a).nbytes
    await until(lambda: not caches(a)._is_short)
    residency = engine(s).dispatcher.affinity.residency
    await until(lambda: not len(residency))
    for _ in range(2):
        assert same(await model.submit(ONE), 2 * ONE)
    assert len(probe.calls) == 3


@both_ways
def test_both_steps_of_a_pipeline_are_found(send: Any) -> None:
    @gen_cluster(client=True, nthreads=PAIR)
    async def test(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        probes = Probe(), Probe(lambda x: x + 1)
        first, second = [
            await deploy(c, probe, name, cache=CachePolicy())
            for probe, name in zip(probes, ("first", "second"), strict=True)
        ]
        for times in range(3):
            x = send(c, first, 3 * ONE)
            y = send(c, second, x)
            assert same(await y, 7 * ONE), times
        # The scheduler cannot know where those of futures are: once on each worker.
        assert len(probes[0].calls) <= 2 and len(probes[1].calls) <= 2

    test()


@both_ways
def test_a_canary_finds_only_what_it_has_answered(send: Any) -> None:
    @gen_cluster(client=True, nthreads=ALONE)
    async def test(c: Client, s: Scheduler, a: Worker) -> None:
        import torch

        x, nets = torch.ones(1, 4), [linear(seed=0), linear(seed=1)]
        model = await deploy(c, nets[0], "net", cache=CachePolicy())
        await model.update(nets[1], version="2", traffic=0.5)
        for times in range(20):
            future = send(c, model, x)
            answer = await future
            about = await daskinfer.info(future)
            net = nets[int(about.version) - 1]
            assert torch.allclose(answer, net(x).detach()), times
        for version, net in zip("12", nets, strict=True):
            future = send(c, await model.pin(version), x)
            assert torch.allclose(await future, net(x).detach())
            figures = (await model.status()).version(version)
            assert figures.failures == 0
        found = (await status(model)).cache
        # Each has computed once. What is not yet stored is taken from who computed it.
        assert found is not None and found.results.misses - found.joined == 2

    test()


@gen_cluster(client=True, nthreads=ALONE)
async def test_every_look_up_is_a_hit_or_a_miss_and_every_request_counts_once(
    c: Client, s: Scheduler, a: Worker
) -> None:
    probe = Probe()
    model = await deploy(c, probe, cache=CachePolicy(), max_batch_size=4)
    inputs = [n % 7 * ONE for n in range(100)]
    for send in WAYS:
        answers = await c.gather([send(c, model, x) for x in inputs])
        assert all(same(y, 2 * x) for x, y in zip(inputs, answers, strict=True))
    found = await status(model)
    cache = found.cache
    assert cache is not None
    results = cache.results
    assert results.hits + results.misses == 200 == found.requests == found.successes
    computed = sum(probe.rows)
    assert results.misses == computed + cache.joined == found.rows + cache.joined
    assert found.passes == len(probe.calls) and computed == 7
    assert results.hit_rate == results.hits / 200
    # The latency model knows of what was computed, and of nothing else.
    (about,) = found.versions
    assert about.requests == 200


@gen_cluster(client=True, nthreads=PAIR)
async def test_for_a_pinned_handle_the_key_of_dask_is_the_hash_of_what_is_asked(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    """``client.submit`` is pure then: equal requests are one task."""
    probe = Probe(lambda x, scale=1: x)
    model = await deploy(c, probe)
    await model.update(Probe(), version="2")
    pins = [await model.pin("1"), await daskinfer.get(c, "m", "1")]
    x = np.zeros((2, 4), "f4")
    equal = [c.submit(pin, x.copy(), scale=2) for pin in pins for _ in range(2)]
    assert len({future.key for future in equal}) == 1
    others = [x.reshape(4, 2), x.view("i4"), x + 1]
    different = [c.submit(pins[0], other, scale=2) for other in others]
    different += [c.submit(pins[0], x, scale=3), c.submit(pins[0], x)]
    different += [c.submit(await model.pin("2"), x)]
    assert len({future.key for future in (*equal, *different)}) == 7
    await c.gather([*equal, *different])
    assert len(probe.calls) == 6
    # The same name and label may mean other weights later, and old futures still live.
    await model.undeploy()
    again = await (await deploy(c, Probe(lambda x, scale=1: x + 1))).pin("1")
    assert np.array_equal(await c.submit(again, x, scale=2), x + 1)


@gen_cluster(client=True, nthreads=ALONE)
async def test_a_deployment_without_a_cache_pays_nothing(
    c: Client, s: Scheduler, a: Worker
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nobody asked for that")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "content_of", refuse)
        patch.setattr(ResultCache, "__init__", refuse)
        patch.setattr("scheduler_plugins.affinity.CacheKey.of", refuse)
        patch.setattr("daskinfer.worker.caching.Caches.look_up", refuse)
        model = await deploy(c, Probe())
        sent: list[dict[str, Any]] = []
        handlers: dict[str, Any] = s.stream_handlers
        take = handlers["daskinfer-done"]

        def note(**message: Any) -> None:
            sent.append(message)
            take(**message)

        handlers["daskinfer-done"] = note
        for send in WAYS:
            await c.gather([send(c, model, n * ONE) for n in range(20)])
        handlers["daskinfer-done"] = take
    told = {(len(m["cached"]), m["look_up"], m["kept"]) for m in sent}
    assert told == {(0, 0.0, b"")}
    assert "daskinfer-caches" not in a.periodic_callbacks
    assert not caches(a)._finder._threads and not caches(a)._keeper._threads
    assert (await model.status()).cache is None


@gen_cluster(client=True, nthreads=ALONE)
async def test_clients_hash_nothing_while_hits_are_too_rare(
    c: Client, s: Scheduler, a: Worker
) -> None:
    model = await deploy(c, Probe(), cache=CachePolicy())
    hashed: list[Any] = []
    content_of = payload.content_of

    def count(*about: Any) -> bytes:
        hashed.append(about)
        return content_of(*about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "WINDOW", 50)
        patch.setattr(payload, "content_of", count)
        for begin in range(0, 500, 50):
            inputs = [n * ONE for n in range(begin, begin + 50)]
            answers = await c.gather(model.map(inputs))
            assert all(same(y, 2 * x) for x, y in zip(inputs, answers, strict=True))
        assert 50 <= len(hashed) <= 150
        # Another deployment's are.
        other = await deploy(c, Probe(), "other", cache=CachePolicy())
        before = len(hashed)
        await other.submit(ONE)
        assert len(hashed) == before + 1
