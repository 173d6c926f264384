"""Make the documentation's pictures: ``python -m tests.dashboard.picture [NAME]``.

For ``dashboard`` four worker processes classify digits for some time while the browser
looks. In the others, workers exist in the scheduler's state alone.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client
from distributed.metrics import monotonic
from distributed.utils import sync

import daskinfer
from daskinfer.demo.digits import load_digits, load_model
from scheduler_plugins import dask_setup
from scheduler_plugins.dashboard.history import INTERVAL
from tests.dashboard.browser import Page, browser
from tests.dashboard.fleet import Fleet
from tests.dashboard.serving import address, cluster, fleet_of

SECONDS = 100
TARGET = Path(__file__).parents[2] / "docs" / "images"


def digits(page: Page) -> None:
    """A canary in a rollout, as the README shows it."""
    images, _ = load_digits()
    processes = daskinfer.LocalCluster(
        n_workers=4, device="cpu", dashboard_address="localhost:0"
    )
    with processes, Client(processes) as client:
        model = daskinfer.deploy(
            client,
            factory="daskinfer.demo.digits:load_model",
            name="digits",
            cache=daskinfer.CachePolicy(),
        )
        daskinfer.deploy(client, load_model(), name="digits-reserve")
        model.update(load_model(), version="2", traffic=0.1)
        ended = threading.Event()

        def ask(most: int) -> None:
            rng = np.random.default_rng(most)
            while not ended.is_set():
                chosen = rng.integers(0, len(images), rng.integers(1, most))
                inputs = [images[i : i + 1] for i in chosen]
                # A third of them are new.
                for i in range(0, len(inputs), 3):
                    noise = rng.random((1, 1, 8, 8), "float32")
                    inputs[i] = inputs[i] + 0.1 * noise
                daskinfer.gather(model.map(inputs))

        threads = [threading.Thread(target=ask, args=(most,)) for most in (40, 200)]
        for thread in threads:
            thread.start()
        try:
            link = client.dashboard_link.replace("/status", "/inference")
            page.open(f"{link}?deployment=digits")
            time.sleep(SECONDS)
            keep(page, "dashboard")
        finally:
            ended.set()
            for thread in threads:
                thread.join()
            page.leave()


@contextmanager
def quiet_cluster(page: Page) -> Any:
    """A cluster without workers of its own."""
    # Those of a fleet have no tasks to look after, and nobody to ask.
    with (
        dask.config.set({"distributed.scheduler.active-memory-manager.start": False}),
        cluster(page, 0) as client,
    ):
        yield client


def live_through(client: Client, fleet: Fleet, seconds: float) -> None:
    """Have the plots filled with what would take so long."""
    feed, counts = fleet.plugin.dashboard, fleet.line.counts

    async def fill() -> None:
        # What has been answered by now is later than what comes.
        counts._answers.clear()
        counts._began = None
        clock, began = feed._clock, monotonic() - seconds
        for number in range(1, int(seconds / INTERVAL) + 1):
            at = began + number * INTERVAL
            fleet.answer(INTERVAL, at)
            feed._clock = lambda at=at: at
            feed.look()
        feed._clock = clock

    sync(client.loop, fill)


def many_workers(page: Page) -> None:
    """Sixty-four workers that are well."""
    with quiet_cluster(page) as client, fleet_of(client, 64) as fleet:
        live_through(client, fleet, 30)
        page.open(address(client))
        keep(page, "dashboard-64-workers")


def sick_worker(page: Page) -> None:
    """Four workers, one of which is given nothing, while requests wait."""
    with quiet_cluster(page) as client, fleet_of(client, 4) as fleet:
        live_through(client, fleet, 110)

        async def fall_ill() -> None:
            reason = "a batch was not answered for 10 s, expected in 18 ms"
            fleet.line.health.open(fleet.addresses[2], monotonic(), reason)
            fleet.ask(30, seconds_ago=1.0)

        sync(client.loop, fall_ill)
        page.open(address(client))
        time.sleep(1.5)
        keep(page, "dashboard-sick-worker")


def nothing(page: Page) -> None:
    """The page before anything is deployed."""
    with quiet_cluster(page) as client:
        sync(client.loop, dask_setup, client.cluster.scheduler)
        page.open(address(client))
        page.until(lambda: page.has("nothing"))
        keep(page, "dashboard-empty")


def keep(page: Page, name: str) -> None:
    """Take a picture, and put it with the documentation."""
    TARGET.mkdir(exist_ok=True)
    shutil.copy(page.picture(name), TARGET)


PICTURES: dict[str, Callable[[Page], None]] = {
    "dashboard": digits,
    "dashboard-64-workers": many_workers,
    "dashboard-sick-worker": sick_worker,
    "dashboard-empty": nothing,
}


def main() -> None:
    """Take all pictures, or those that are named."""
    with browser() as page:
        for name in sys.argv[1:] or PICTURES:
            PICTURES[name](page)


if __name__ == "__main__":
    main()
