"""Clusters whose dashboard a browser looks at, and what they are busy with."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from distributed import Client, LocalCluster
from distributed.utils import sync

import daskinfer
from scheduler_plugins import dask_setup
from tests.dashboard.browser import Page
from tests.dashboard.fleet import Fleet


@contextmanager
def cluster(page: Page, workers: int, **scheduler_kwargs: Any) -> Iterator[Client]:
    """Workers in this process, and a dashboard without complaints of the browser."""
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=False,
            dashboard_address="localhost:0",
            scheduler_kwargs=scheduler_kwargs,
        ) as made,
        Client(made) as client,
    ):
        try:
            yield client
            assert page.complaints() == []
        finally:
            # Before what serves it ends, which would be one.
            page.leave()


def address(client: Client, path: str = "inference", prefix: str = "") -> str:
    port = client.cluster.scheduler.http_server.port
    return f"http://localhost:{port}{prefix}/{path}"


class Sleeper:
    """A model whose passes take time without taking the machine's."""

    def __call__(self, x: Any) -> Any:
        time.sleep(0.002 + 0.0001 * len(x))
        return x * 2


@contextmanager
def load(model: Any, size: int) -> Iterator[None]:
    """Keep a model busy with so many requests at a time."""
    ended = threading.Event()

    def ask() -> None:
        rng = np.random.default_rng(0)
        while not ended.is_set():
            numbers = rng.integers(0, 2000, size)
            inputs = [np.full((1, 4), number, "float32") for number in numbers]
            daskinfer.gather(model.map(inputs))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def grows(page: Page, value: Callable[[], float]) -> None:
    before = value()
    page.until(lambda: value() > before)


@contextmanager
def fleet_of(client: Client, workers: int) -> Iterator[Fleet]:
    """Workers in the scheduler's state, which answer four times a second."""
    scheduler = client.cluster.scheduler

    async def begin() -> tuple[Fleet, asyncio.Task[None]]:
        await dask_setup(scheduler)
        fleet = Fleet(scheduler, workers)

        async def live() -> None:
            while True:
                fleet.answer(0.25)
                await asyncio.sleep(0.25)

        return fleet, asyncio.create_task(live())

    async def end(fleet: Fleet, life: asyncio.Task[None]) -> None:
        life.cancel()
        fleet.take()
        fleet.leave()

    fleet, life = sync(client.loop, begin)
    try:
        yield fleet
    finally:
        sync(client.loop, end, fleet, life)
