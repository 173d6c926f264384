"""More models than fit, where room comes and goes."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import torch
from distributed import Worker
from distributed.utils_test import gen_cluster
from torch import nn

import daskinfer
from tests.cluster.helpers import Builder, Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine
from tests.cluster.test_weights_cache import (
    ONE_WORKER,
    RESTLESS,
    SMALL,
    Net,
    answers,
    models,
    resident,
    where,
)

#: Seconds after which who waits waits in vain.
SOON = 2


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_who_waits_has_the_room_of_what_is_undeployed(
    c: Any, s: Any, a: Any
) -> None:
    x = await deploy(c, Net(60_000), "x")
    y = await deploy(c, Net(60_000), "y", keep_loaded=True)
    waiting = x.submit(ONE)
    await until(lambda: engine(s).dispatcher.lines["x", "1"].queue.count == 1)
    await asyncio.sleep(0.1)
    await y.undeploy()
    assert (await asyncio.wait_for(waiting, SOON) == 2).all()


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_who_waits_has_the_room_of_a_load_that_is_called_off(
    c: Any, s: Any, a: Any
) -> None:
    x = await deploy(c, Net(60_000), "x")
    slow = Probe(is_open=False)
    y = await daskinfer.deploy(c, Net(60_000, slow), name="y", warmup=ONE, wait=False)
    await until(lambda: len(slow.calls) == 1)
    waiting = x.submit(ONE)
    await until(lambda: engine(s).dispatcher.lines["x", "1"].queue.count == 1)
    await asyncio.sleep(0.1)
    undeploying = asyncio.ensure_future(y.undeploy())
    await asyncio.sleep(0.1)
    slow.open()
    await undeploying
    assert (await asyncio.wait_for(waiting, SOON) == 2).all()


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1), ("127.0.0.1", 1, {"resources": {"Y": 1}})],
    config=SMALL,
)
async def test_what_found_no_room_beside_what_is_kept_has_it_later(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    y = await deploy(c, Net(60_000), "y", keep_loaded=True, resources={"Y": 1})
    x = await deploy(c, Net(60_000), "x")
    assert (where(s, "x"), where(s, "y")) == ([a.address], [b.address])
    await y.undeploy()
    waiting = x.options(workers=[b.address]).submit(ONE)
    assert (await asyncio.wait_for(waiting, SOON) == 2).all()


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_room_is_made_later_for_what_was_larger_than_known(
    c: Any, s: Any, a: Any
) -> None:
    probe = Probe()
    x = await deploy(c, Net(60_000, probe), "x")
    probe.close()
    running = x.submit(ONE)
    await probe.entered()
    y = await daskinfer.deploy(
        c,
        factory=f"{__name__}:large",
        name="y",
    )
    assert resident(a) == {"x", "y"}
    probe.open()
    await running
    await asyncio.sleep(1)
    await answers(y)
    await until(lambda: len(resident(a)) == 1)


def large() -> Any:
    return Net(60_000)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=RESTLESS)
async def test_a_new_model_waits_for_the_room_of_what_has_to_go(
    c: Any, s: Any, a: Any
) -> None:
    probe = Probe()
    x = await deploy(c, Net(90_000, probe), "x")
    z = await deploy(c, Net(30_000), "z")
    await answers(x)
    probe.close()
    running = x.submit(ONE)
    await probe.entered(2)
    asked = z.submit(ONE)
    await until(lambda: where(s, "x") == [])
    y = await daskinfer.deploy(c, Net(60_000), name="y", wait=False)
    await asyncio.sleep(0.5)
    assert "y" not in resident(a)
    probe.open()
    await running
    await asked
    await answers(y)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_a_new_model_waits_for_the_room_of_what_is_undeployed(
    c: Any, s: Any, a: Any
) -> None:
    probe = Probe()
    x = await deploy(c, Net(90_000, probe), "x")
    probe.close()
    running = x.submit(ONE)
    await probe.entered(1)
    undeploying = asyncio.ensure_future(x.undeploy())
    await until(lambda: "x" not in engine(s).registry.deployments)
    y = await daskinfer.deploy(c, Net(60_000), name="y", wait=False)
    await asyncio.sleep(0.5)
    assert "y" not in resident(a)
    probe.open()
    await running
    await undeploying
    await answers(y)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_an_update_that_had_to_go_can_be_promoted(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Net(30_000, bias=1), "x")
    await model.update(Net(30_000, bias=2), version="2", activate="manual")
    await asyncio.sleep(0.1)
    await model.submit(ONE)
    # `x` is asked for, its next version is not.
    await deploy(c, Net(60_000), "y")
    assert models(a) == {("x", "1"), ("y", "1")}
    await model.promote()
    assert (await model.submit(ONE) == 4).all()


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_the_previous_version_is_not_given_up_where_it_does_not_fit_beside(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, Net(60_000, bias=1), "x")
    with dask.config.set({"daskinfer.weights.host": "200 kB"}):
        async with Worker(s.address, nthreads=1):
            await until(lambda: len(where(s, "x")) == 2)
            await model.update(Net(60_000, bias=2), version="2")
            future = model.options(workers=[a.address]).submit(ONE)
            assert (await future == 4).all()
    await until(lambda: len(engine(s).registry.workers) == 1)
    await model.rollback()
    assert (await asyncio.wait_for(model.submit(ONE), SOON) == 3).all()


@gen_cluster(client=True, config=SMALL)
async def test_the_active_version_comes_back_when_its_last_worker_dies_in_an_update(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    await deploy(c, Net(60_000), "y")
    model = await deploy(c, Net(60_000, bias=1), "x")
    (first,) = where(s, "x")
    await answers_with(model, 3)
    # Where `x` is not.
    await model.update(Net(60_000, bias=2), version="2", traffic=0.5)
    assert where(s, "x", "2") != [first]
    dying = next(worker for worker in (a, b) if worker.address == first)
    await dying.close()
    await model.abort()
    await answers_with(model, 3)


async def answers_with(model: Any, value: float) -> None:
    assert (await asyncio.wait_for(model.submit(ONE), SOON) == value).all()


@gen_cluster(client=True, config=SMALL)
async def test_nobody_waits_behind_who_insists_on_another_worker(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    probe = Probe()
    x = await deploy(c, Net(60_000), "x")
    y = await deploy(c, Net(60_000, probe), "y")
    await deploy(c, Net(60_000), "z")
    (busy,) = where(s, "y")
    await answers(y)
    assert where(s, "x") == []
    (idle,) = where(s, "z")
    probe.close()
    running = y.submit(ONE)
    await probe.entered(2)
    first = x.options(workers=[busy]).submit(ONE)
    await until(lambda: engine(s).dispatcher.lines["x", "1"].queue.count == 1)
    await asyncio.sleep(0.1)
    second = x.options(workers=[idle]).submit(ONE)
    try:
        assert (await asyncio.wait_for(second, SOON) == 2).all()
    finally:
        probe.open()
    await running
    await first


@gen_cluster(client=True, config=SMALL)
async def test_nobody_waits_for_a_load_where_it_cannot_go(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    probe = Probe()
    x = await deploy(c, Net(60_000, probe), "x", warmup=ONE)
    await deploy(c, Net(60_000), "y")
    await deploy(c, Net(60_000), "z")
    assert where(s, "x") == []
    probe.close()
    begun = len(probe.calls)
    first = x.options(workers=[a.address]).submit(ONE)
    await probe.entered(begun + 1)
    second = x.options(workers=[b.address]).submit(ONE)
    try:
        await asyncio.wait_for(probe.entered(begun + 2), SOON)
    finally:
        probe.open()
    await asyncio.gather(first, second)


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_failing_now_and_then_is_no_reason_to_give_a_model_up(
    c: Any, s: Any, a: Any
) -> None:
    builder = Builder()
    x = await daskinfer.deploy(
        c,
        factory=f"{__name__}:build_large",
        factory_kwargs={"builder": builder},
        name="x",
    )
    y = await deploy(c, Net(60_000), "y")
    for _ in range(6):
        await answers(y)
        assert where(s, "x") == []
        builder.failures = builder.built + 1
        assert (await asyncio.wait_for(x.submit(ONE), SOON) == 2).all()


def build_large(builder: Builder) -> Any:
    builder.build()
    return Net(60_000)


# Dask keeps the thread of a future's callbacks.
@gen_cluster(
    client=True, nthreads=ONE_WORKER, config=RESTLESS, clean_kwargs={"threads": False}
)
async def test_a_model_calls_one_for_which_there_is_no_room_beside_it(
    c: Any, s: Any, a: Any
) -> None:
    inner = await deploy(c, Net(60_000), "inner")
    outer = await deploy(c, Calling(60_000, inner), "outer")
    assert resident(a) == {"outer"}
    assert (await asyncio.wait_for(outer.submit(ONE), 15) == 3).all()


class Calling(nn.Module):
    def __init__(self, nbytes: int, other: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((nbytes // 4,), 1.0))
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x) + self.weight[0].detach()


@gen_cluster(client=True, nthreads=ONE_WORKER, config=SMALL)
async def test_what_is_kept_loaded_can_be_updated_again_and_again(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, Net(45_000, bias=1), "x", keep_loaded=True)
    for version in (2, 3, 4):
        await model.update(Net(45_000, bias=version), version=str(version))
        await answers_with(model, 2 + version)
