"""Make the picture for the README: ``python -m tests.dashboard.picture``.

Four worker processes classify digits for some time while the browser looks.
"""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import numpy as np
from distributed import Client

import daskinfer
from daskinfer.demo.digits import load_digits, load_model
from tests.dashboard.browser import browser

SECONDS = 100
TARGET = Path(__file__).parents[2] / "docs" / "images" / "dashboard.png"


def main() -> None:
    """Load the cluster, take the picture, and put it with the documentation."""
    images, _ = load_digits()
    cluster = daskinfer.LocalCluster(
        n_workers=4, device="cpu", dashboard_address="localhost:0"
    )
    with cluster, Client(cluster) as client:
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
            with browser() as page:
                link = client.dashboard_link.replace("/status", "/inference")
                page.open(f"{link}?deployment=digits")
                time.sleep(SECONDS)
                taken = page.picture("digits")
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    TARGET.parent.mkdir(exist_ok=True)
    shutil.copy(taken, TARGET)


if __name__ == "__main__":
    main()
