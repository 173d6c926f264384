"""How much noise does a classifier bear? An analysis script with ``client.submit``.

Each noise level is a chain of three Dask tasks: add the noise, classify, compare with
the labels. Only the middle one is the model; it is submitted like the others, and the
scheduler plugin batches what is waiting.

Run it with ``python -m examples.analysis``.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt
from distributed import Client, as_completed

import daskinfer
from daskinfer.demo.digits import load_digits

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def add_noise(images: Images, level: float) -> Images:
    """Return the images with normal noise of standard deviation `level`."""
    noise = np.random.default_rng(0).normal(scale=level, size=images.shape)
    return (images + noise).astype(np.float32)


def score(logits: npt.NDArray[np.float32], labels: Labels, level: float) -> str:
    """Return a line of the report."""
    right = (logits.argmax(axis=1) == labels).mean()
    return f"noise {level:.2f}: {right:7.2%} right"


def main(arguments: list[str] | None = None) -> None:
    """Print the share of digits classified right for each noise level."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--images", type=int, default=1797)
    parser.add_argument("--levels", type=int, default=8)
    parser.add_argument("--workers", type=int, help="default: one per device")
    options = parser.parse_args(arguments)
    images, labels = load_digits()
    images, labels = images[: options.images], labels[: options.images]

    with (
        daskinfer.LocalCluster(n_workers=options.workers) as cluster,
        Client(cluster) as client,
    ):
        model = daskinfer.deploy(
            client, factory="daskinfer.demo.digits:load_model", name="digits"
        )
        images_on_workers = client.scatter(images)
        lines = []
        for level in np.linspace(0, 1, options.levels):
            noisy = client.submit(add_noise, images_on_workers, level)
            logits = client.submit(model, noisy)
            lines.append(client.submit(score, logits, labels, level))
        for line in as_completed(lines):
            print(line.result())


if __name__ == "__main__":
    main()
