"""Worker processes that miss an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed import Nanny
from distributed.utils_test import gen_cluster

import daskinfer
from tests.cluster.helpers import until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left
from tests.cluster.test_network_cut import IMPATIENT, ONE_WORKER, Network

pytestmark = pytest.mark.process


def says(number: float) -> Callable[[Any], Any]:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: np.ndarray) -> np.ndarray:
        return np.full_like(x, number)

    return answer


async def answered_by(future: Any) -> tuple[str, str]:
    """Version and worker of an answer, which must be that version's."""
    answer = await future
    info = await daskinfer.info(future)
    assert answer[0, 0] == float(info.version)
    return info.version, info.worker


@gen_cluster(client=True, nthreads=ONE_WORKER, Worker=Nanny, timeout=90)
async def test_a_worker_that_was_stopped_during_the_update(
    c: Any, s: Any, a: Any
) -> None:
    """With version 1 still loaded, it serves nothing before it has version 2."""
    async with Nanny(s.address, nthreads=1, name="far") as far:
        model = await deploy(c, says(1))
        await until(lambda: len(engine(s).registry.version("m").ready()) == 2)
        pid, address = far.pid, far.worker_address
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await model.update(says(2), version="2", min_ready=0.5)
            there = model.options(workers=["far"]).map([ONE] * 4)
            others = model.map([ONE] * 8)
            told = [await answered_by(future) for future in others]
            assert set(told) == {("2", a.worker_address)}
            assert not any(future.done() for future in there)
        finally:
            os.kill(pid, signal.SIGCONT)
        told = [await answered_by(future) for future in there]
        assert set(told) == {("2", address)}
        assert far.pid == pid  # it is the same process
        del there, others
        await nothing_is_left(s)


@gen_cluster(
    client=True, nthreads=ONE_WORKER, Worker=Nanny, config=IMPATIENT, timeout=90
)
async def test_connections_that_are_reset_during_the_update(
    c: Any, s: Any, a: Any
) -> None:
    """The worker that takes its place loads what is active, and then takes requests."""
    network = Network(s)
    async with network.up():
        async with Nanny(network.address, nthreads=1, name="far") as far:
            model = await deploy(c, says(1))
            await until(lambda: len(engine(s).registry.version("m").ready()) == 2)
            gone = far.worker_address
            network.reset()
            await until(lambda: gone not in s.workers)
            await model.update(says(2), version="2")
        async with Nanny(network.address, nthreads=1, name="far"):
            future = model.options(workers=["far"]).submit(ONE)
            version, worker = await answered_by(future)
            assert (version, worker) == ("2", s.aliases["far"])
            del future
            await nothing_is_left(s)
