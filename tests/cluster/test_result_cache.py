"""Results that are cached on the workers, asked for both ways."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from distributed import Client, Future, Scheduler, Worker
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import BatchPolicy, CachePolicy
from daskinfer.cache import gate
from daskinfer.status import DeploymentStatus
from daskinfer.worker import caching
from tests.cluster.cache_helpers import until_stored
from tests.cluster.helpers import Local, Probe, linear, until

ONE = [("", 1)]
TWO = [("", 1)] * 2


def by_handle(client: Client, model: Any, *args: Any, **kwargs: Any) -> Future[Any]:
    return model.submit(*args, **kwargs)  # type: ignore[no-any-return]


def by_client(client: Client, model: Any, *args: Any, **kwargs: Any) -> Future[Any]:
    return client.submit(model, *args, pure=False, **kwargs)


WAYS: list[Callable[..., Future[Any]]] = [by_handle, by_client]
both_ways = pytest.mark.parametrize("send", WAYS)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Answer:
    x: Any


#: What models answer to rows.
ANSWERS: dict[str, Callable[[Any], Any]] = {
    "array": lambda x: x * 2,
    "float16": lambda x: x.astype("f2"),
    "bool": lambda x: x > 1,
    "texts": lambda x: [f"{row.sum():g}" for row in x],
    "tuple": lambda x: (x, x.astype("i8")),
    "named": lambda x: Pair(x, x[:, 0]),
    "dict": lambda x: {"a": x, "b": {"c": x.sum(1)}},
    "odict": lambda x: OrderedDict(a=x),
    "dataclass": Answer,
    "tensor": torch.from_numpy,
    "bfloat16": lambda x: torch.from_numpy(x).to(torch.bfloat16),
}


def same(a: Any, b: Any) -> bool:
    """Whether two answers are equal in every respect."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Answer):
        return same(a.x, b.x)
    return bool(a == b)


async def status(model: Any) -> DeploymentStatus:
    found: DeploymentStatus = await model.status()
    assert found.cache is not None
    return found


@both_ways
def test_an_equal_request_is_not_computed_again(send: Any) -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe()
        model = await daskinfer.deploy(client, probe, cache=CachePolicy())
        x = np.arange(6.0).reshape(2, 3)
        first = send(client, model, x)
        expected = await first
        assert not (await daskinfer.info(first)).cached
        await until_stored(worker)
        second = send(client, model, x.copy())
        assert same(await second, expected)
        assert (await daskinfer.info(second)).cached
        assert len(probe.calls) == 1
        found = await status(model)
        assert found.cache is not None
        assert (found.cache.results.hits, found.cache.results.misses) == (1, 1)
        assert found.cache.results["host"].entries == 1
        assert "cache of 1 worker: 2 look-ups, 50.0 % hits" in str(found)
        assert (found.passes, found.successes) == (1, 2)

    test()


def test_both_ways_find_what_the_other_has_left() -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe()
        model = await daskinfer.deploy(client, probe, cache=CachePolicy())
        for number, order in enumerate((WAYS, WAYS[::-1])):
            x = np.full((1, 2), number)
            for send in order:
                await send(client, model, x)
        assert len(probe.calls) == 2

    test()


@both_ways
def test_whatever_differs_is_computed(send: Any) -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe(lambda x, scale=1: x)
        models = [
            await daskinfer.deploy(client, probe, name=name, cache=CachePolicy())
            for name in ("net", "other")
        ]
        x = np.zeros((2, 4), "f4")
        inputs = [x, x.reshape(4, 2), x.view("i4"), torch.from_numpy(x), x.tolist()]
        calls = [(models[0], each, {}) for each in inputs]
        calls += [(models[1], x, {}), (models[0], x, {"scale": 2})]
        calls += [(models[0], x, {"scale": 2.0})]
        for times in (1, 2):
            for model, each, kwargs in calls:
                answer = await send(client, model, each, **kwargs)
                assert same(answer, each), times
            assert len(probe.calls) == len(calls)

    test()


@gen_cluster(client=True, nthreads=ONE)
async def test_other_weights_under_the_same_name_are_computed(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    x = torch.ones(1, 4)
    for seed in (0, 1, 0):
        net = linear(seed=seed)
        model = await daskinfer.deploy(client, net, name="net", cache=CachePolicy())
        for _ in range(2):
            assert torch.allclose(await model.submit(x), net(x).detach())
        await model.undeploy()


@both_ways
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_hit_equals_a_miss(send: Any, kind: str) -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe(ANSWERS[kind])
        model = await daskinfer.deploy(client, probe, cache=CachePolicy())
        x = np.arange(6, dtype="f4").reshape(2, 3)
        miss = await send(client, model, x)
        for _ in range(2):
            future = send(client, model, x)
            assert same(await future, miss)
            assert (await daskinfer.info(future)).cached
        assert len(probe.calls) == 1

    test()


@both_ways
def test_hits_and_misses_come_back_in_order(send: Any) -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe()
        model = await daskinfer.deploy(client, probe, cache=CachePolicy())
        known = [np.full((1, 2), float(n)) for n in range(0, 60, 3)]
        await client.gather([send(client, model, x) for x in known])
        computed = sum(probe.rows)
        futures = [send(client, model, np.full((1, 2), float(n))) for n in range(60)]
        answers = await client.gather(futures)
        assert [answer[0, 0] for answer in answers] == [2.0 * n for n in range(60)]
        assert sum(probe.rows) == computed + 40

    test()


@both_ways
def test_identical_requests_in_flight_are_computed_once(send: Any) -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe(is_open=False)
        model = await daskinfer.deploy(
            client, probe, cache=CachePolicy(), batching=BatchPolicy(max_batch_size=4)
        )
        first = send(client, model, np.ones((1, 2)))
        await probe.entered()
        # Some are sent behind the first, others wait at the scheduler.
        others = [send(client, model, np.ones((1, 2))) for _ in range(20)]
        probe.open()
        for answer in await client.gather([first, *others]):
            assert same(answer, np.full((1, 2), 2.0))
        assert probe.rows == [1]

    test()


@gen_cluster(client=True, nthreads=ONE)
async def test_what_equal_requests_get_is_their_own(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    probe = Probe(is_open=False)
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    hold = model.submit(np.zeros((1, 3)))
    await probe.entered()
    futures = [model.submit(np.ones((1, 2))) for _ in range(3)]
    probe.open()
    await client.gather([hold, *futures])
    hit = model.submit(np.ones((1, 2)))
    await hit
    values = [worker.data[future.key] for future in (*futures, hit)]
    for value in values:
        value[:] += 1  # by a careless task on the same worker
    assert [value[0, 0] for value in values] == [3.0] * 4
    assert same(await model.submit(np.ones((1, 2))), np.full((1, 2), 2.0))


@both_ways
def test_errors_are_not_kept(send: Any) -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        failing = [True]

        def flaky(x: Any) -> Any:
            if failing[0]:
                raise ArithmeticError("not today")
            return x

        probe = Probe(flaky)
        model = await daskinfer.deploy(client, probe, cache=CachePolicy())
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="not today"):
                await send(client, model, np.ones((1, 2)))
        assert len(probe.calls) == 2
        failing[0] = False
        for _ in range(2):
            await send(client, model, np.ones((1, 2)))
        assert len(probe.calls) == 3

    test()


@gen_cluster(client=True, nthreads=ONE)
async def test_a_failing_request_takes_no_equal_or_other_one_with_it(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    def picky(x: Any) -> Any:
        if (x < 0).any():
            raise ArithmeticError("negative")
        return x

    probe = Probe(picky, is_open=False)
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    hold = model.submit(np.zeros((1, 2)))
    await probe.entered()
    bad = [model.submit(-np.ones((1, 2))) for _ in range(3)]
    good = [model.submit(np.ones((1, 2))) for _ in range(3)]
    probe.open()
    await hold
    for future in bad:
        with pytest.raises(ArithmeticError, match="negative"):
            await future
    for future in good:
        assert same(await future, np.ones((1, 2)))


@gen_cluster(client=True, nthreads=ONE)
async def test_a_cancelled_request_takes_no_equal_one_with_it(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    probe = Probe(is_open=False)
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    hold = model.submit(np.zeros((1, 2)))
    await probe.entered()
    first, second = (model.submit(np.ones((1, 2))) for _ in range(2))
    await until(lambda: len(scheduler.tasks) == 3)
    await first.cancel()
    probe.open()
    await hold
    assert same(await second, np.full((1, 2), 2.0))


@gen_cluster(client=True, nthreads=ONE)
async def test_a_hit_does_not_wait_for_the_device(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    await model.submit(np.ones((1, 2)))
    probe.close()
    slow = model.submit(np.zeros((1, 2)))
    await probe.entered(2)
    assert same(await model.submit(np.ones((1, 2))), np.full((1, 2), 2.0))
    assert slow.status == "pending"
    probe.open()
    await slow


@gen_cluster(client=True, nthreads=ONE)
async def test_inputs_that_are_futures_are_told_apart_by_their_values(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    await model.submit(np.ones((1, 2)))
    for value, computed in ((1.0, 1), (2.0, 2), (2.0, 2)):
        x = client.submit(np.full, (1, 2), value, pure=False)
        for send in WAYS:
            answer = await send(client, model, x)
            assert same(answer, np.full((1, 2), 2 * value))
        assert len(probe.calls) == computed


class Opaque(Local):
    """An input of which nobody can tell whether two are equal."""


@both_ways
def test_what_has_no_stable_content_is_computed_and_counted(send: Any) -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe(lambda x, about: x)
        model = await daskinfer.deploy(client, probe, cache=CachePolicy())
        about = Opaque()
        for _ in range(3):
            await send(client, model, np.ones((1, 2)), about=about)
        assert len(probe.calls) == 3
        cache = (await status(model)).cache
        assert cache is not None
        assert (cache.uncacheable, cache.results.entries) == (3, 0)

    test()


@gen_cluster(client=True, nthreads=ONE)
async def test_results_that_nobody_can_copy_are_not_kept(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    model = await daskinfer.deploy(
        client, lambda x: [{1} for _ in x], name="sets", cache=CachePolicy()
    )
    for _ in range(2):
        assert await model.submit(np.ones((2, 2))) == [{1}, {1}]
    cache = (await status(model)).cache
    assert cache is not None and cache.uncacheable == 2


@gen_cluster(client=True, nthreads=TWO)
async def test_cleared_results_are_computed_again(
    client: Client, scheduler: Scheduler, *workers: Worker
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    for expected in (1, 2):
        for _ in range(3):
            await model.submit(np.ones((1, 2)))
        assert len(probe.calls) == expected
        await model.cache_clear()
        found = (await status(model)).cache
        assert found is not None and (found.workers, found.results.entries) == (2, 0)


@gen_cluster(client=True, nthreads=ONE)
async def test_nothing_is_cached_by_default(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe)
    for _ in range(2):
        await model.submit(np.ones((1, 2)))
    assert len(probe.calls) == 2
    assert (await model.status()).cache is None
    await model.cache_clear()


@gen_cluster(client=True, nthreads=ONE)
async def test_what_is_no_policy_is_refused(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    bad: Any = True
    with pytest.raises(TypeError, match="cache must be a CachePolicy, not True"):
        await daskinfer.deploy(client, Probe(), cache=bad)
    assert not await daskinfer.deployments(client)


@gen_cluster(client=True, nthreads=ONE)
async def test_handles_from_elsewhere_know_of_the_cache(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    await daskinfer.deploy(client, Probe(), name="net", cache=CachePolicy())
    assert (await daskinfer.get(client, "net")).cached
    assert [model.cached for model in await daskinfer.deployments(client)] == [True]


def test_a_restarted_worker_finds_its_results_again(tmp_path: Path) -> None:
    @gen_cluster(
        client=True,
        nthreads=ONE,
        config={"daskinfer.cache.directory": str(tmp_path)},
    )
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe()
        model = await daskinfer.deploy(client, probe, cache=CachePolicy())
        inputs = [np.full((1, 2), float(n)) for n in range(20)]
        await client.gather([model.submit(x) for x in inputs])
        computed = len(probe.calls)
        await worker.close()
        plugin: Any = scheduler.plugins["daskinfer"]
        assert not len(plugin.dispatcher.affinity.residency)
        async with Worker(scheduler.address, nthreads=1):
            # The scheduler is told without being asked.
            await until(lambda: len(plugin.dispatcher.affinity.residency) == 20)
            for send in WAYS:
                futures = [send(client, model, x) for x in inputs]
                answers = await client.gather(futures)
                for x, answer in zip(inputs, answers, strict=True):
                    assert same(answer, 2 * x)
        assert len(probe.calls) == computed

    test()


@gen_cluster(client=True, nthreads=ONE)
async def test_other_versions_are_computed(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    x = torch.ones(1, 4)
    nets = [linear(seed=0), linear(seed=1)]

    async def asked(version: int) -> bool:
        """Whether the answer, which is that of a version, was found."""
        future = model.submit(x)
        assert torch.allclose(await future, nets[version](x).detach())
        cached: bool = (await daskinfer.info(future)).cached
        return cached

    model = await daskinfer.deploy(client, nets[0], name="net", cache=CachePolicy())
    assert [await asked(0), await asked(0)] == [False, True]
    await model.update(nets[1], version="2")
    assert [await asked(1), await asked(1)] == [False, True]
    await model.rollback()
    assert await asked(0)


def test_weights_are_told_apart_on_disk(tmp_path: Path) -> None:
    x = torch.ones(1, 4)
    found: list[bool] = []
    for seed in (0, 1, 0, 1):

        @gen_cluster(
            client=True,
            nthreads=ONE,
            config={"daskinfer.cache.directory": str(tmp_path)},
        )
        async def test(
            client: Client, scheduler: Scheduler, worker: Worker, seed: int = seed
        ) -> None:
            net = linear(seed=seed)
            model = await daskinfer.deploy(client, net, name="net", cache=CachePolicy())
            future = model.submit(x)
            assert torch.allclose(await future, net(x).detach())
            found.append((await daskinfer.info(future)).cached)

        test()
    assert found == [False, False, True, True]


@gen_cluster(client=True, nthreads=TWO)
async def test_requests_go_where_their_result_is(
    client: Client, scheduler: Scheduler, *workers: Worker
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    first = model.submit(np.ones((1, 2)))
    await first
    home = (await daskinfer.info(first)).worker
    plugin: Any = scheduler.plugins["daskinfer"]
    await until(lambda: len(plugin.dispatcher.affinity.residency) == 1)
    # Where it is, the device is busy. It would be faster elsewhere, were it computed.
    probe.close()
    busy = model.options(workers=home).submit(np.zeros((1, 2)))
    await probe.entered(2)
    for _ in range(5):
        future = model.submit(np.ones((1, 2)))
        await future
        about = await daskinfer.info(future)
        assert (about.worker, about.cached) == (home, True)
    assert len(probe.calls) == 2
    probe.open()
    await busy


@gen_cluster(client=True, nthreads=TWO)
async def test_a_result_that_is_not_where_it_should_be_is_computed_there(
    client: Client, scheduler: Scheduler, *workers: Worker
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    first = model.submit(np.ones((1, 2)))
    await first
    home = (await daskinfer.info(first)).worker
    (worker,) = (worker for worker in workers if worker.address == home)
    runtime: Any = worker.plugins["daskinfer-runtime"]
    (cache,) = runtime.caches._caches.values()
    # Behind the scheduler's back, as if it had just been evicted.
    await runtime.caches.store(cache._tiers.clear)
    again = model.submit(np.ones((1, 2)))
    assert same(await again, np.full((1, 2), 2.0))
    about = await daskinfer.info(again)
    assert (about.worker, about.cached, len(probe.calls)) == (home, False, 2)


@gen_cluster(client=True, nthreads=TWO)
async def test_who_waits_goes_where_the_result_has_come(
    client: Client, scheduler: Scheduler, *workers: Worker
) -> None:
    """Of requests that are sent at once, each kind is computed once on each worker."""
    probe = Probe()
    model = await daskinfer.deploy(
        client, probe, cache=CachePolicy(), batching=BatchPolicy(max_batch_size=2)
    )
    inputs = [np.full((1, 2), float(n % 5)) for n in range(500)]
    answers = await client.gather(model.map(inputs))
    assert all(same(a, 2 * x) for x, a in zip(inputs, answers, strict=True))
    assert sum(probe.rows) <= 10


@gen_cluster(client=True, nthreads=TWO)
async def test_a_worker_that_is_lost_takes_nothing_with_it(
    client: Client, scheduler: Scheduler, *workers: Worker
) -> None:
    probe = Probe()
    model = await daskinfer.deploy(client, probe, cache=CachePolicy())
    first = model.submit(np.ones((1, 2)))
    await first
    home = (await daskinfer.info(first)).worker
    first.release()
    (leaving,) = (worker for worker in workers if worker.address == home)
    await leaving.close()
    assert same(await model.submit(np.ones((1, 2))), np.full((1, 2), 2.0))
    assert len(probe.calls) == 2


@gen_cluster(client=True, nthreads=ONE)
async def test_memory_goes_back_when_it_is_short(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    model = await daskinfer.deploy(client, Probe(), cache=CachePolicy())
    await client.gather(model.map([np.full((1, 1000), float(n)) for n in range(20)]))
    runtime: Any = worker.plugins["daskinfer-runtime"]
    (cache,) = runtime.caches._caches.values()
    await until(lambda: cache.nbytes >= 20 * 8000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caching, "excess_bytes", lambda *_: 80_000)
        await until(lambda: cache.nbytes == 0)
    assert same(await model.submit(np.ones((1, 2))), np.full((1, 2), 2.0))


@gen_cluster(client=True, nthreads=ONE)
async def test_a_cache_without_hits_is_not_asked(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    model = await daskinfer.deploy(client, Probe(), cache=CachePolicy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "WINDOW", 100)
        await client.gather(model.map([np.full((1, 1), float(n)) for n in range(500)]))
    cache = (await status(model)).cache
    assert cache is not None
    assert cache.resting == 1 and cache.skipped + cache.results.misses == 500
    assert 100 <= cache.results.misses < 500


@gen_cluster(client=True, nthreads=ONE)
async def test_undeploy_lets_go_of_the_results(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    model = await daskinfer.deploy(client, Probe(), cache=CachePolicy())
    await model.submit(np.ones((1, 2)))
    runtime: Any = worker.plugins["daskinfer-runtime"]
    plugin: Any = scheduler.plugins["daskinfer"]
    assert runtime.caches._caches
    await model.undeploy()
    await until(lambda: not runtime.caches._caches)
    await until(lambda: not len(plugin.dispatcher.affinity.residency))


def test_the_configuration_sets_what_the_policy_leaves_out() -> None:
    config = {"daskinfer.cache.host.size": "1 MiB", "daskinfer.cache.packed.size": 0}

    @gen_cluster(client=True, nthreads=ONE, config=config)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        model = await daskinfer.deploy(client, Probe(), cache=CachePolicy())
        cache = (await status(model)).cache
        assert cache is not None
        tiers = {tier.name: tier.budget for tier in cache.results.tiers}
        assert tiers == {"host": 2**20}

    test()


def test_dask_collections_are_served_from_the_cache() -> None:
    @gen_cluster(client=True, nthreads=ONE)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        import dask.array as da

        probe = Probe()
        model = await daskinfer.deploy(client, probe, cache=CachePolicy())
        x = da.ones((8, 2), chunks=(2, 2))
        for _ in range(2):
            lazy = x.map_blocks(model, dtype=float, meta=np.empty((0, 0)))
            (answer,) = await client.gather(client.compute([lazy]))
            assert same(answer, np.full((8, 2), 2.0))
        assert sum(probe.rows) == 2

    test()
