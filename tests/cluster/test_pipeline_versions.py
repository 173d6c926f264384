"""The steps of a pipeline are answered by one set of versions."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import Model
from tests.cluster.helpers import Local, Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy, engine
from tests.cluster.version_helpers import Says, active

ONE_WORKER = [("", 1)]


def add(number: float) -> Any:
    return lambda x: x + number


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_step_whose_input_the_old_version_has_answered(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, add(1))
    other = await deploy(c, add(10), name="n")
    first = model.submit(ONE)
    plain = c.submit(np.negative, first)
    await plain
    await model.update(add(100), version="2")
    await other.update(add(1000), version="2")
    # Directly, by Dask's own call, and with a task of another kind in between.
    assert (await model.submit(first))[0, 0] == 3
    assert (await c.submit(model, first))[0, 0] == 3
    assert (await other.submit(first))[0, 0] == 12
    chain = other.submit(model.submit(plain))
    assert (await chain)[0, 0] == 9
    # What begins now has the new set.
    assert (await other.submit(model.submit(ONE)))[0, 0] == 1101
    # And when the old ones are gone, the active ones answer.
    await model.update(add(5), version="3", keep_previous=False)
    assert (await model.submit(first))[0, 0] == 7


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_steps_of_a_graph_have_the_versions_of_its_arrival(
    c: Any, s: Any, a: Any
) -> None:
    old = Probe(lambda x: x + 1)
    model = await deploy(c, old, max_batch_size=1)
    old.close()
    parts = [dask.delayed(model)(np.full((1, 1), float(i))) for i in range(6)]
    total = c.compute(dask.delayed(np.concatenate)(parts))
    # Requests of no pipeline move instead.
    alone = model.map([ONE] * 6)
    await old.entered()
    await until(lambda: len(engine(s).requests) == 12)
    await model.update(Says(2), version="2")
    old.open()
    assert (await total).ravel().tolist() == [1, 2, 3, 4, 5, 6]
    answers = [x[0, 0] for x in await c.gather(alone)]
    assert answers[-4:] == [2] * 4
    chain = model
    assert (await c.compute(dask.delayed(chain)(dask.delayed(chain)(ONE))))[0, 0] == 2


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_steps_of_a_pipeline_have_one_canary(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, add(1))
    await model.update(add(100), version="2", traffic=0.5)
    ends = []
    for _ in range(30):
        ends.append(model.submit(model.submit(model.submit(np.zeros((1, 1))))))
    told = {x[0, 0] for x in await c.gather(ends)}
    assert told == {3, 300}


class CallsTwice(Local):
    """A model that calls another one before and after a gate."""

    def __init__(self, other: Model, gate: Probe) -> None:
        self.other = other
        self.gate = gate

    def __call__(self, x: Any) -> Any:
        before = self.other(x)
        self.gate(x)
        return np.concatenate([before, self.other(x)], axis=1)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_model_that_calls_another_while_that_is_updated(
    c: Any, s: Any, a: Any
) -> None:
    inner = await deploy(c, Says(1), name="inner")
    gate = Probe(is_open=False)
    outer = await deploy(c, CallsTwice(inner, gate), name="outer")
    running = outer.submit(ONE)
    await gate.entered()
    await inner.update(Says(2), version="2")
    assert active(s, "inner") == "2"
    gate.open()
    # A batch sees what was active when it was sent.
    assert (await running).tolist() == [[1, 1]]
    assert (await outer.submit(ONE)).tolist() == [[2, 2]]
    await inner.rollback()
    assert (await outer.submit(ONE)).tolist() == [[1, 1]]
    pinned = await deploy(c, CallsTwice(await inner.pin("2"), gate), name="pinned")
    assert (await pinned.submit(ONE)).tolist() == [[2, 2]]
    info = await daskinfer.info(running)
    assert (info.name, info.version) == ("outer", "1")
