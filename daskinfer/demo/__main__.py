"""The demo: classify all handwritten digits, with plain Dask and with daskinfer.

Starts a local cluster, deploys the trained network, sends each of the 1,797 images
as a request of its own, and compares with what the same cluster does without
daskinfer. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed import Client, Future
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import daskinfer
from daskinfer.demo.digits import (
    accuracy,
    classify,
    held_out,
    load_digits,
    load_model,
)
from daskinfer.status import DeploymentStatus
from daskinfer.wording import counted


@dataclass
class Way:
    """One way to classify all images, and how long its rounds took."""

    name: str
    send: Callable[[], list[Future[Any]]]
    gather: Callable[[list[Future[Any]]], list[Any]]
    seconds: list[float] = field(default_factory=list)
    logits: npt.NDArray[np.float32] | None = None

    def run(self, progress: Progress, *, warm_up: bool) -> None:
        """Send all requests, wait for all results, and note the time."""
        bar = progress.add_task(f"{self.name}{' (warm-up)' if warm_up else ''}")
        begin = time.perf_counter()
        futures = self.send()
        with watched(futures, progress, bar):
            results = self.gather(futures)
        if not warm_up:
            self.seconds.append(time.perf_counter() - begin)
        self.logits = np.concatenate(results)


@contextmanager
def watched(
    futures: list[Future[Any]], progress: Progress, bar: TaskID
) -> Iterator[None]:
    """Keep a progress bar up to date from a thread of its own."""
    ended = threading.Event()

    def count() -> None:
        progress.update(bar, total=len(futures))
        while not ended.wait(0.1):
            progress.update(bar, completed=sum(future.done() for future in futures))

    thread = threading.Thread(target=count, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    progress.update(bar, completed=len(futures))


def run(client: Client, console: Console, images: Sequence[Any], rounds: int) -> None:
    """Compare the ways on `client`'s cluster and print what came out."""
    model = daskinfer.deploy(
        client,
        factory="daskinfer.demo.digits:load_model",
        name="digits",
        warmup=images[0],
    )
    net = client.scatter(load_model(), broadcast=True)
    ways = [
        Way(
            "plain Dask, client.map(f, images)",
            lambda: client.map(classify, images, net=net, pure=False),
            client.gather,
        ),
        Way(
            "client.map(model, images)",
            lambda: client.map(model, images, pure=False),
            client.gather,
        ),
        Way(
            "model.map(images), daskinfer.gather",
            lambda: model.map(images),
            daskinfer.gather,
        ),
    ]
    columns = (
        TextColumn("{task.description:<48}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        # In turn, so that a slow moment of the machine hits all alike.
        for number in range(rounds + 1):
            for way in ways:
                way.run(progress, warm_up=number == 0)

    console.print(speed_table(ways, len(images)))
    console.print(model_table(model.status()))


def speed_table(ways: Sequence[Way], images: int) -> Table:
    """Return requests per second of each way, and how often the digit was right."""
    _, labels = load_digits()
    labels = labels[:images]
    baseline = statistics.median(ways[0].seconds)
    table = Table(title=f"{images:,} requests of one image, median of the rounds")
    table.add_column("way", no_wrap=True)
    table.add_column("requests/s", justify="right")
    table.add_column("against plain Dask", justify="right")
    table.add_column("accuracy", justify="right")
    for way in ways:
        assert way.logits is not None
        seconds = statistics.median(way.seconds)
        table.add_row(
            way.name,
            f"{images / seconds:,.0f}",
            f"{baseline / seconds:.1f} ×",
            f"{(way.logits.argmax(axis=1) == labels).mean():.2%}",
        )
    return table


def model_table(status: DeploymentStatus) -> Table:
    """Return what the deployment's status says of batches and workers."""
    table = Table(title=f"{status.name}, version {status.active_version}")
    table.add_column("worker")
    table.add_column("device")
    table.add_column("batches", justify="right")
    table.add_column("rows", justify="right")
    table.add_column("share", justify="right")
    for worker in status.workers:
        share = worker.rows / status.rows if status.rows else 0.0
        table.add_row(
            worker.address,
            worker.device or "",
            f"{worker.batches:,}",
            f"{worker.rows:,}",
            f"{share:.1%}",
        )
    mean = status.mean_batch_size
    table.caption = f"mean batch size {mean:.1f}" if mean else "no batch ran"
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m daskinfer.demo", description="Classify handwritten digits."
    )
    parser.add_argument("--workers", type=int, help="workers (default: one per device)")
    parser.add_argument("--images", type=int, default=1797, help="how many, at most")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    parser.add_argument(
        "--keep", action="store_true", help="keep the dashboard up until Enter"
    )
    options = parser.parse_args(arguments)
    console = Console()
    images, labels = load_digits()
    _, testing = held_out(labels)
    score = accuracy(load_model(), images[testing], labels[testing])
    requests = [image[np.newaxis] for image in images[: options.images]]

    with (
        daskinfer.LocalCluster(n_workers=options.workers) as cluster,
        Client(cluster) as client,
    ):
        console.print(f"dashboard: {client.dashboard_link}")
        console.print(
            f"{counted(len(cluster.workers), 'worker')}; accuracy of the bare "
            f"network on the {len(testing)} images held out from training: {score:.2%}"
        )
        run(client, console, requests, options.rounds)
        if options.keep:
            console.input("The dashboard stays up. Press Enter to end. ")


if __name__ == "__main__":
    main()
