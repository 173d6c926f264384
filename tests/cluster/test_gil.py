"""Models that hold the interpreter's lock, as native code may."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed import Client

import daskinfer

_HELD_MICROSECONDS = 3_000_000


def holding() -> Callable[[Any], Any]:
    """Build a model that answers how often another thread ran while it was built."""
    ran: list[int] = []
    ended = threading.Event()
    started = threading.Event()

    def count() -> None:
        started.set()
        while not ended.wait(0.01):
            ran.append(1)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    started.wait()
    before = len(ran)
    # Unlike `ctypes.CDLL`, this one does not let go of the lock.
    assert ctypes.PyDLL(None).usleep(_HELD_MICROSECONDS) == 0
    times = len(ran) - before
    ended.set()
    thread.join()
    return lambda x: np.full(len(x), times)


@pytest.mark.process
def test_a_worker_that_holds_the_lock_while_it_loads_stays() -> None:
    with (
        daskinfer.LocalCluster(
            n_workers=1, device="cpu", dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        before = client.run(os.getpid)
        model = daskinfer.deploy(client, factory=f"{__name__}:holding", name="holding")
        # A few rounds at its edges; hundreds had the lock been free.
        assert model(np.ones((2, 1))).max() < 20
        assert client.run(os.getpid) == before
        actions = {event["action"] for _, event in client.get_events("all")}
        assert "add-worker" in actions and "remove-worker" not in actions


def holds_in_a_pass() -> Callable[[Any], Any]:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: Any) -> Any:
        import ctypes

        if (x == 5).any():
            ctypes.PyDLL(None).usleep(5_000_000)
        return x + 1

    return answer


@pytest.mark.process
def test_a_worker_whose_pass_holds_the_lock_for_five_seconds_stays() -> None:
    with (
        daskinfer.LocalCluster(
            n_workers=1, device="cpu", dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        before = client.run(os.getpid)
        model = daskinfer.deploy(client, holds_in_a_pass(), name="holding")
        futures = model.map([np.full((1, 1), i) for i in range(10)])
        assert [int(y[0, 0]) for y in client.gather(futures)] == list(range(1, 11))
        assert {daskinfer.info(future).attempts for future in futures} == {1}
        assert client.run(os.getpid) == before
        actions = {event["action"] for _, event in client.get_events("all")}
        assert "remove-worker" not in actions
        assert model.status().failures == 0
