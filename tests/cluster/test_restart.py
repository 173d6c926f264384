"""``client.restart()`` with requests under way."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from distributed import CancelledError, Nanny
from distributed.utils_test import gen_cluster

from tests.cluster.helpers import until
from tests.cluster.scheduling_helpers import ONE, deploy, engine, nothing_is_left

pytestmark = pytest.mark.process


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, Worker=Nanny, timeout=120)
async def test_restart_with_queued_and_running_requests(c, s, a, b):
    def stuck(x):
        threading.Event().wait()

    def double(x):
        return 2 * x

    hung = await deploy(c, stuck, "hung", max_batch_size=1)
    fine = await deploy(c, double, "fine")
    futures = [c.submit(hung, i * ONE) for i in range(5)]
    futures += [hung.submit(i * ONE) for i in range(5)]
    dispatcher = engine(s).dispatcher
    await until(
        lambda: len(dispatcher.running.batches) >= 2 and len(engine(s).requests) == 10
    )
    before = set(s.workers)
    await c.restart()
    for future in futures:
        assert future.status == "cancelled"
        with pytest.raises(CancelledError):
            await future
    await nothing_is_left(s)
    # What was deployed is still there, and is loaded by the new workers.
    assert not before & set(s.workers)
    for future in (c.submit(fine, ONE), fine.submit(ONE)):
        assert np.array_equal(await future, 2 * ONE)
    await until(lambda: len(dispatcher.lines["fine", "1"].devices) == 2)
    assert set(dispatcher.lines["fine", "1"].devices) == set(s.workers)
