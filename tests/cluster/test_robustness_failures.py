"""Exceptions that are hard to carry, and workers that leave while they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from daskinfer import InferenceError
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import ONE, deploy


class Speechless(Exception):
    """Fails when it is asked what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def _raise(error: type[Exception]) -> None:
    raise error


def _recurse(depth: int = 0) -> int:
    return 1 + _recurse(depth + 1)


@pytest.mark.parametrize(
    "fail, error, said",
    [
        (lambda: _raise(Speechless), InferenceError, "the model raised Speechless"),
        (_recurse, Exception, "maximum recursion depth"),
    ],
    ids=["without words", "too deep a traceback"],
)
def test_exceptions_that_dask_cannot_carry(
    fail: Callable[[], None], error: type[Exception], said: str
) -> None:
    def fail_on_negative(x: np.ndarray) -> np.ndarray:
        if x.min() < 0:
            fail()
        return x

    @gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        probe = Probe(fail_on_negative, is_open=False)
        model = await deploy(client, probe)
        first = model.submit(ONE)
        await probe.entered()
        # In one batch with the one that fails, and answered all the same.
        bad, good = model.submit(-ONE), model.submit(ONE)
        probe.open()
        with pytest.raises(error, match=said):
            await bad
        assert (await good == 1).all() and (await first == 1).all()

    test()


@gen_cluster(client=True, nthreads=[("", 1)] * 2, timeout=60)
async def test_batches_that_reach_a_closing_worker_run_elsewhere(
    client: Client, scheduler: Scheduler, *workers: Worker
) -> None:
    model = await deploy(client, Probe())
    leaving = workers[0]
    runtime: Any = leaving.plugins["daskinfer-runtime"]
    # The worker has begun to close, and the scheduler does not know yet.
    await runtime.teardown(leaving)
    handle = leaving.stream_handlers["daskinfer-run"]
    arrived: list[Any] = []

    def note(**message: Any) -> None:
        arrived.append(message)
        handle(**message)

    leaving.stream_handlers["daskinfer-run"] = note
    futures = model.options(workers=leaving.address, allow_other_workers=True).map(
        [ONE] * 3
    )
    await until(lambda: bool(arrived))
    await leaving.close()
    for future in futures:
        assert (await future == 2).all()
