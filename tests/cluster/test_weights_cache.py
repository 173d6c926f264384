"""More models than fit: which are loaded where, and which make room."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import numpy as np
import pytest
import torch
from distributed import Scheduler, Worker
from distributed.utils_test import gen_cluster
from torch import nn

import daskinfer
from daskinfer import CachePolicy, Model
from daskinfer.exceptions import ModelTooLarge, NoReadyWorker, UpdateFailed
from tests.cluster.helpers import Probe, until
from tests.cluster.http_helpers import scrape
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left

#: Room for one model of 60 kB, or for three of 30.
SMALL = {"daskinfer.weights.host": "100 kB", "daskinfer.weights.turn": "1h"}
#: Those that are asked for may go as well.
RESTLESS = SMALL | {"daskinfer.weights.turn": "0s"}
ONE_WORKER = [("", 1)]


class Net(nn.Module):
    """So many bytes of weights, and a probe that computes twice the input."""

    def __init__(
        self, nbytes: int, probe: Probe | None = None, bias: float = 0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((nbytes // 4,), float(bias)))
        self.probe = probe or Probe()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.probe(x) + self.weight[0].detach()


def where(scheduler: Scheduler, name: str, version: str = "1") -> list[str]:
    """The workers that have a model."""
    found = engine(scheduler).registry.version(name, version)
    return sorted(replica.address for replica in found.ready())


def resident(worker: Worker) -> set[str]:
    """Names of what is in the memory of a worker's device."""
    return {name for name, _ in models(worker)}


def models(worker: Worker) -> set[tuple[str, str]]:
    """Names and versions of what is in the memory of a worker's device."""
    return set(worker.plugins["daskinfer-runtime"].loader.models)  # type: ignore[attr-defined]


async def weights(model: Model, version: str = "1") -> Any:
    return (await model.status()).version(version).weights


async def answers(model: Model, count: int = 1) -> None:
    assert all((x == 2).all() for x in await asyncio.gather(*model.map([ONE] * count)))


@gen_cluster(client=True, config=SMALL)
async def test_what_fits_is_loaded_everywhere(c: Any, s: Any, a: Any, b: Any) -> None:
    for name in "xyz":
        await deploy(c, Net(30_000), name)
    assert [resident(worker) for worker in (a, b)] == [set("xyz")] * 2


@gen_cluster(client=True, config=SMALL)
async def test_a_new_model_is_loaded_where_the_least_recently_used_makes_room(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    x = await deploy(c, Net(60_000), "x")
    y = await deploy(c, Net(60_000), "y")
    assert sorted(where(s, "x") + where(s, "y")) == sorted([a.address, b.address])
    await answers(x, 10)
    z = await deploy(c, Net(60_000), "z")
    # `x` has been used since `y` was.
    assert where(s, "y") == []
    assert sorted(where(s, "x") + where(s, "z")) == sorted([a.address, b.address])
    assert sorted(map(resident, (a, b)), key=str) == sorted([{"x"}, {"z"}], key=str)
    await answers(z)
    await answers(y)
    assert (await weights(y)).evictions >= 1


@gen_cluster(client=True, nthreads=ONE_WORKER, config=RESTLESS)
async def test_what_is_cold_counts_as_ready(c: Any, s: Any, a: Any) -> None:
    x = await deploy(c, Net(60_000), "x")
    y = await deploy(c, Net(60_000), "y")
    assert where(s, "x") == []
    assert engine(s).readiness.problems() == {"x": None, "y": None}
    await answers(x)
    pytest.importorskip("prometheus_client")
    figures = await scrape(s)
    assert figures("ready") == 2
    assert figures("model_bytes", deployment="x") == 60_000
    for name, model in (("x", x), ("y", y)):
        told = await weights(model)
        about = {"deployment": name, "version": "1"}
        assert figures("model_evictions_total", **about) == told.evictions > 0
        assert figures("model_loads_total", **about) == sum(told.loads.values())
    assert figures("replicas", state="cold") == 1
    # They say what they are as long as they are there.
    await a.close()
    assert set(engine(s).readiness.problems()) == {"x", "y"}
    assert None not in engine(s).readiness.problems().values()


@gen_cluster(client=True, config=SMALL)
async def test_a_new_model_is_loaded_where_there_is_room(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    """Not where it would evict a busy one."""
    probe = Probe()
    x = await deploy(c, Net(60_000, probe), "x")
    y = await deploy(c, Net(60_000), "y")
    (busy,), (idle,) = where(s, "x"), where(s, "y")
    probe.close()
    future = x.submit(ONE)
    await probe.entered()
    z = await deploy(c, Net(60_000), "z")
    assert (where(s, "x"), where(s, "y"), where(s, "z")) == ([busy], [], [idle])
    await answers(z)
    probe.open()
    await future
    await answers(y)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_ten_requests_for_a_cold_model_load_it_once(
    c: Any, s: Any, a: Any
) -> None:
    x = await deploy(c, Net(60_000), "x")
    await deploy(c, Net(60_000), "y")
    assert resident(a) == {"y"}
    before = (await weights(x)).loads
    assert sum(before.values()) == 1
    futures = [x.submit(ONE) for _ in range(10)]
    assert all((answer == 2).all() for answer in await asyncio.gather(*futures))
    assert resident(a) == {"x"}
    assert sum((await weights(x)).loads.values()) == 2


@gen_cluster(client=True, config=RESTLESS)
async def test_a_hot_model_is_loaded_on_a_second_worker(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    """When the first is full."""
    probe = Probe()
    x = await deploy(c, Net(60_000, probe), "x", max_batch_size=1)
    await deploy(c, Net(60_000), "y")
    await answers(x, 4)
    (first,) = where(s, "x")
    probe.close()
    futures = x.map([ONE] * 200)
    await until(lambda: len(where(s, "x")) == 2)
    assert where(s, "y") == []
    # Each of them runs one.
    await probe.entered(4 + 2)
    probe.open()
    await asyncio.gather(*futures)
    told = await asyncio.gather(*(daskinfer.info(future) for future in futures))
    assert {info.worker for info in told} == {a.address, b.address}
    assert first in (a.address, b.address)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_nobody_in_use_makes_room(c: Any, s: Any, a: Any) -> None:
    probe = Probe()
    x = await deploy(c, Net(60_000, probe), "x")
    probe.close()
    future = x.submit(ONE)
    await probe.entered()
    y = asyncio.ensure_future(deploy(c, Net(60_000), "y"))
    await until(lambda: "y" in engine(s).registry.deployments)
    # A decision is made with every event.
    for _ in range(3):
        engine(s).dispatcher.wake()
        await asyncio.sleep(0)
    assert (resident(a), where(s, "x")) == ({"x"}, [a.address])
    probe.open()
    assert (await future == 2).all()
    await answers(await y)
    assert resident(a) == {"y"}


@gen_cluster(client=True, nthreads=ONE_WORKER, config=RESTLESS)
async def test_one_that_is_always_asked_for_makes_room_after_its_turn(
    c: Any, s: Any, a: Any
) -> None:
    """Its batches under way end first, and it comes back."""
    probe = Probe()
    x = await deploy(c, Net(60_000, probe), "x", max_batch_size=1)
    y = await deploy(c, Net(60_000), "y")
    await answers(x)
    probe.close()
    waiting = x.map([ONE] * 20)
    await probe.entered(2)
    asked = y.submit(ONE)
    await until(lambda: where(s, "x") == [])
    # In the worker's memory it stays until its batches have ended.
    assert not asked.done()
    probe.open()
    assert (await asked == 2).all()
    assert all((answer == 2).all() for answer in await asyncio.gather(*waiting))
    assert (await weights(x)).evictions >= 2


@gen_cluster(client=True, config=SMALL)
async def test_a_model_that_can_never_fit_is_refused_with_the_numbers(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    x = await deploy(c, Net(60_000), "x")
    with pytest.raises(
        ModelTooLarge, match=r"takes 19\d\.\d+ kiB.*may take 97\.66 kiB.*weights"
    ):
        await deploy(c, Net(200_000), "y")
    assert len(where(s, "x")) == 2
    await answers(x)
    assert [m.name for m in await daskinfer.deployments(c)] == ["x"]


@gen_cluster(client=True, config=SMALL)
async def test_what_is_kept_loaded_never_makes_room(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    x = await deploy(c, Net(30_000), "x", keep_loaded=True)
    y = await deploy(c, Net(60_000), "y")
    z = await deploy(c, Net(60_000), "z")
    for model in (y, z, y, z, x):
        await answers(model, 3)
    assert len(where(s, "x")) == 2
    with pytest.raises(ModelTooLarge, match="kept for others"):
        await deploy(c, Net(90_000), "w")


@gen_cluster(client=True, config=SMALL)
async def test_what_is_kept_loaded_is_loaded_everywhere_though_others_have_the_room(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    x = await deploy(c, Net(60_000), "x")
    await deploy(c, Net(60_000), "y", keep_loaded=True)
    await until(lambda: len(where(s, "y")) == 2)
    assert where(s, "x") == []
    late = x.options(timeout="0.5s").submit(ONE)
    await until(lambda: engine(s).dispatcher.lines["x", "1"].queue.count == 1)
    assert "97.66 kiB" in (await x.status()).problem
    with pytest.raises(
        NoReadyWorker, match=r"of which 5\d\.\d+ kiB are kept for others"
    ):
        await late


@gen_cluster(client=True, config=SMALL)
async def test_many_requests_for_many_models(c: Any, s: Any, a: Any, b: Any) -> None:
    """Of which each worker has room for three at a time."""
    models = [await deploy(c, Net(30_000, bias=i), f"m{i}") for i in range(10)]
    rng = np.random.default_rng(0)
    asked = [
        (int(i), models[int(i)].submit(np.full((1, 1), i + 1.0)))
        for i in rng.zipf(1.3, 1000) % 10
    ]
    for i, future in asked:
        assert await future == 2 * (i + 1) + i
    for worker in (a, b):
        assert len(resident(worker)) <= 3
    await asyncio.gather(*(c.cancel(f) for _, f in asked))
    told = [await weights(model) for model in models]
    assert all(sum(t.loads.values()) >= 1 for t in told)
    del asked, future
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_an_update_never_takes_the_place_of_what_it_updates(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, Net(60_000), "x")
    with pytest.raises(UpdateFailed, match="kept for others"):
        await model.update(Net(60_000), version="2")
    await answers(model)
    assert where(s, "x") == [a.address]


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_an_update_comes_to_a_small_worker_once_the_old_version_may_go(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, Net(60_000, bias=1), "x")
    with dask.config.set({"daskinfer.weights.host": "200 kB"}):
        async with Worker(s.address, nthreads=1) as large:
            await until(lambda: len(where(s, "x")) == 2)
            await model.update(Net(60_000, bias=2), version="2")
            assert where(s, "x", "2") == [large.address]
            future = model.options(workers=[a.address]).submit(ONE)
            assert (await future == 4).all()
            assert models(a) == {("x", "2")}


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_the_previous_version_makes_room_and_can_be_gone_back_to(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, Net(30_000, bias=1), "x")
    await model.update(Net(30_000, bias=2), version="2")
    other = await deploy(c, Net(60_000), "y")
    assert (where(s, "x", "1"), where(s, "x", "2")) == ([], [a.address])
    await model.rollback()
    assert (await model.submit(ONE) == 3).all()
    await answers(other)


@gen_cluster(client=True, config=SMALL)
async def test_the_only_worker_that_has_a_model_dies(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    x = await deploy(c, Net(60_000), "x")
    y = await deploy(c, Net(60_000), "y")
    (last,) = where(s, "x")
    dying = next(worker for worker in (a, b) if worker.address == last)
    await dying.close()
    await answers(x, 5)
    await answers(y, 5)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_a_worker_joins_that_has_no_room_for_all(c: Any, s: Any, a: Any) -> None:
    x, y, z = [await deploy(c, Net(60_000), name) for name in "xyz"]
    async with Worker(s.address, nthreads=1) as b:
        await until(lambda: resident(b) == {"x"})
        await answers(x)
        await answers(z)
        # Nobody has asked for `y`.
        assert where(s, "y") == []
        assert (where(s, "x"), where(s, "z")) == ([b.address], [a.address])
        await answers(y)


@gen_cluster(client=True, config=SMALL)
async def test_requests_that_insist_on_a_worker_have_it_loaded_there(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    x = await deploy(c, Net(60_000), "x")
    await deploy(c, Net(60_000), "y")
    (has,) = where(s, "x")
    other = next(w.address for w in (a, b) if w.address != has)
    future = x.options(workers=[other]).submit(ONE)
    assert (await future == 2).all()
    assert where(s, "x") == sorted([has, other])
    assert (await daskinfer.info(future)).worker == other


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_requests_that_wait_for_a_model_to_be_loaded_can_be_late(
    c: Any, s: Any, a: Any
) -> None:
    probe = Probe()
    x = await deploy(c, Net(60_000), "x")
    y = await deploy(c, Net(60_000, probe), "y")
    probe.close()
    held = y.submit(ONE)
    await probe.entered()
    with pytest.raises(NoReadyWorker, match="cold"):
        await x.options(timeout="20ms").submit(ONE)
    # And an undeployed one waits for nothing.
    waiting = x.submit(ONE)
    await until(lambda: engine(s).dispatcher.lines["x", "1"].queue.count == 1)
    await x.undeploy()
    with pytest.raises(daskinfer.UnknownDeployment):
        await waiting
    probe.open()
    await held


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_status_tells_where_weights_are(c: Any, s: Any, a: Any) -> None:
    x = await deploy(c, Net(60_000), "x")
    assert "weights" not in str(await x.status())
    await deploy(c, Net(60_000), "y")
    status = await x.status()
    assert [worker.state for worker in status.workers] == ["cold"]
    assert status.problem is None
    told = status.version("1").weights
    assert (told.device, told.disk + told.host, told.evictions) == (0, 1, 1)
    assert "weights of version 1: 5" in str(status)
    assert "evicted 1 time" in str(status)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_a_cold_model_is_called_through_dask(c: Any, s: Any, a: Any) -> None:
    x = await deploy(c, Net(60_000), "x")
    await deploy(c, Net(60_000), "y")
    assert (await c.submit(x, ONE) == 2).all()


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_cached_results_outlast_the_model(c: Any, s: Any, a: Any) -> None:
    x = await deploy(c, Net(60_000), "x", cache=CachePolicy())
    assert (await x.submit(ONE) == 2).all()
    y, z = [await deploy(c, Net(60_000), name) for name in "yz"]
    # Whatever else comes and goes.
    for model in (y, z, y):
        await answers(model)
    again = x.options(key="again").submit(ONE)
    assert (await again == 2).all()
    assert (await daskinfer.info(again)).cached


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_a_model_that_comes_back_is_run_in_by_one_pass(
    c: Any, s: Any, a: Any
) -> None:
    probe = Probe()
    x = await deploy(c, Net(60_000, probe), "x", max_batch_size=4, warmup=ONE)
    assert probe.rows == [1] * 3 + [2] * 3 + [4] * 3
    curve = engine(s).dispatcher.lines["x", "1"].latency.table("cpu/1-threads")
    await deploy(c, Net(60_000), "y")
    await answers(x)
    assert probe.rows[9:] == [1, 1]
    assert len(curve) == 3
