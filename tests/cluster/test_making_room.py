"""What models take, what they may take, and one leaving before another comes."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import numpy as np
import pytest
import torch
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import CachePolicy, ModelTooLarge, protocol
from daskinfer.installation import install
from tests.cluster.helpers import FACTORY, Builder, Probe, linear, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine
from tests.cluster.weights_helpers import Hand, artifacts_asked_for

ONE_WORKER = [("127.0.0.1", 1)]
X = np.ones((2, 4), np.float32)
#: Of a network that is larger than what comes with a message.
LARGE = 4 * 256 * (256 + 1)


def large() -> torch.nn.Module:
    return linear(256, 256)


def tied() -> torch.nn.Module:
    net = torch.nn.Sequential(linear(), linear(), torch.nn.BatchNorm1d(3))
    net[1].weight = net[0].weight
    return net


class WithArray:
    """A callable that is no module, with 80,000 bytes of its own."""

    def __init__(self) -> None:
        self.array = np.ones(10_000)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x * self.array[0]


# What a load tells


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_load_tells_bytes_and_source(c: Any, s: Any, a: Any) -> None:
    await deploy(c, large(), name="large")
    await deploy(c, tied(), name="tied")
    await deploy(c, WithArray(), name="array")
    await deploy(c, Probe(), name="small")
    hand = Hand(s, a)

    async def reloaded(name: str) -> tuple[int, str]:
        await hand.unloaded(name, keep=False)
        answer = await hand.loaded(name)
        return answer["nbytes"], answer["source"]

    assert await reloaded("large") == (LARGE, protocol.DISK)
    # Weights that are shared, biases, and four statistics and a counter.
    assert await reloaded("tied") == (4 * (12 + 3 + 3) + 4 * 4 * 3 + 8, "")
    nbytes, source = await reloaded("array")
    assert 80_000 < nbytes < 90_000 and source == protocol.DISK
    nbytes, source = await reloaded("small")
    assert 0 < nbytes < 1000 and source == ""


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_first_load_of_all_has_fetched(c: Any, s: Any, a: Any) -> None:
    await install(c)
    heard = []
    handle = s.stream_handlers[protocol.LOADED]

    def hear(**message: Any) -> None:
        heard.append((message["name"], message["source"], message["nbytes"]))
        handle(**message)

    s.stream_handlers[protocol.LOADED] = hear
    # Nobody has had it before.
    net = linear(256, 256, seed=secrets.randbits(60))
    await deploy(c, net, name="first")
    # Another deployment with the same weights.
    await deploy(c, net, name="second")
    with pytest.raises(ZeroDivisionError):
        await daskinfer.deploy(c, factory=f"{__name__}:fail", name="third")
    assert heard == [
        ("first", "", LARGE),
        ("second", protocol.DISK, LARGE),
        ("third", "", 0),
    ]


def fail() -> Any:
    raise ZeroDivisionError


# Limits


@gen_cluster(
    client=True,
    nthreads=ONE_WORKER,
    worker_kwargs={"memory_limit": 2 * LARGE - 2},
    config={"distributed.worker.memory.pause": False},
)
async def test_a_module_that_is_too_large_is_not_built(c: Any, s: Any, a: Any) -> None:
    asked = r"'m' '1' takes 25\d\.\d\d kiB, and models may take 257\.00 kiB of "
    asked += f"the memory of {a.address}: raise daskinfer.weights.host, or"
    with pytest.raises(ModelTooLarge, match=asked):
        await deploy(c, large())
    # What is small is still welcome.
    model = await deploy(c, linear(), name="n")
    assert (await model.submit(X)).shape == (2, 3)


@gen_cluster(
    client=True, nthreads=ONE_WORKER, config={"daskinfer.weights.host": "100 B"}
)
async def test_what_a_factory_makes_is_measured_and_dropped(
    c: Any, s: Any, a: Any
) -> None:
    builder = Builder()
    kwargs = {"builder": builder}
    model = await daskinfer.deploy(c, factory=FACTORY, factory_kwargs=kwargs)
    await model.undeploy()
    asked = f"'large' '1' takes {LARGE / 1024:.2f} kiB, and models may take 100 B of"
    with pytest.raises(ModelTooLarge, match=asked):
        await daskinfer.deploy(c, factory=f"{__name__}:large", name="large")
    assert not a.plugins["daskinfer-runtime"].loader.models


@gen_cluster(client=True, nthreads=ONE_WORKER, config={"daskinfer.weights.host": None})
async def test_no_limit(c: Any, s: Any, a: Any) -> None:
    await deploy(c, large())
    assert await room_of(s, a) == {}


@gen_cluster(
    client=True, nthreads=ONE_WORKER, worker_kwargs={"memory_limit": 4_000_000}
)
async def test_a_worker_tells_how_much_models_may_take(c: Any, s: Any, a: Any) -> None:
    await install(c)
    await until(lambda: len(engine(s).registry.workers) == 1)
    assert await room_of(s, a) == {"cpu": 2_000_000}


async def room_of(s: Any, a: Any) -> dict[str, int]:
    """What a worker says when it says hello."""
    heard: list[dict[str, int]] = []
    handle = s.stream_handlers[protocol.HELLO]
    s.stream_handlers[protocol.HELLO] = lambda **told: heard.append(told["room"])
    await a.plugins["daskinfer-runtime"]._say_hello()
    await until(lambda: bool(heard))
    s.stream_handlers[protocol.HELLO] = handle
    return heard[0]


# Order


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_models_on_the_cpu_are_dropped_though_they_may_be_wanted(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, linear())
    hand = Hand(s, a)
    assert await hand.unloaded("m", keep=True) == [("unloaded", "m")]
    assert hand.loader.parking.stats()["entries"] == 0
    assert (await hand.loaded("m"))["source"] == ""
    assert (await model.submit(X)).shape == (2, 3)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_load_waits_until_others_have_left(c: Any, s: Any, a: Any) -> None:
    probe, builder = Probe(), Builder()
    model = await deploy(c, probe)
    kwargs = {"builder": builder}
    await daskinfer.deploy(c, name="n", factory=FACTORY, factory_kwargs=kwargs)
    await deploy(c, linear(), name="other")
    hand = Hand(s, a)
    await hand.unloaded("n")
    await hand.unloaded("other")
    probe.close()
    running = model.submit(ONE)
    await probe.entered()
    asked = artifacts_asked_for(s)
    leaving = hand.unload("m")
    load = hand.load("n", after=[leaving])
    await until(lambda: asked["n"] == 1)
    # A load that waits for nobody is not held up, and goes through the same thread.
    await hand.loaded("other")
    assert builder.built == 1 and not hand.has_answered(load)
    probe.open()
    await hand.answer(load)
    assert builder.built == 2
    assert hand.heard[-2:] == [("unloaded", "m"), ("loaded", "n")]
    assert (await running)[0, 0] == 2


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_unloads_that_have_ended_are_not_waited_for(
    c: Any, s: Any, a: Any
) -> None:
    await deploy(c, linear())
    hand = Hand(s, a)
    ended = hand.unload("m")
    await hand.answer(ended)
    await hand.loaded("m", after=[ended, 12345])


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_load_that_waits_can_be_called_off(c: Any, s: Any, a: Any) -> None:
    probe = Probe()
    model = await deploy(c, probe)
    await deploy(c, linear(), name="n")
    hand = Hand(s, a)
    await hand.unloaded("n")
    probe.close()
    running = model.submit(ONE)
    await probe.entered()
    load = hand.load("n", after=[hand.unload("m")])
    assert await hand.unloaded("n") == [("unloaded", "n")]
    probe.open()
    await running
    await until(lambda: ("unloaded", "m") in hand.heard)
    assert not hand.has_answered(load)
    assert not hand.loader.models and not hand.loader._loading


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_results_stay_as_long_as_the_model_may_come_back(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, linear(), cache=CachePolicy())
    expected = await model.submit(X)
    caches = a.plugins["daskinfer-runtime"].caches
    cache = caches._caches["m"]
    await until(lambda: cache.nbytes > 0)
    hand = Hand(s, a)
    await hand.unloaded("m", keep=True)
    await hand.loaded("m")
    future = model.submit(X)
    assert np.array_equal(await future, expected)
    assert (await daskinfer.info(future)).cached
    await hand.unloaded("m", keep=False)
    assert "m" not in caches._caches


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_new_model_does_not_wait_for_an_old_one_of_its_name(
    c: Any, s: Any, a: Any
) -> None:
    probe = Probe()
    old = await deploy(c, probe)
    probe.close()
    running = old.submit(ONE)
    await probe.entered()
    undeploying = asyncio.ensure_future(old.undeploy())
    await until(lambda: len(engine(s).unloading) == 1)
    await deploy(c, linear())
    assert not undeploying.done()
    probe.open()
    await undeploying
    await running
