"""A dask.array pipeline with a model in the middle.

``model.predict`` takes a lazy array and gives a lazy array, so nothing is computed and
nothing is loaded before the end, and the whole may be larger than memory.
``map_blocks`` with the handle does the same where you want to say more yourself.

Run it with ``python -m examples.dask_array``.
"""

from __future__ import annotations

import argparse

import dask.array as da
import numpy as np
from distributed import Client

import daskinfer
from daskinfer.demo.digits import load_digits


def main(arguments: list[str] | None = None) -> None:
    """Classify a chunked array of digits in both ways."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--repeat", type=int, default=10, help="copies of the images")
    parser.add_argument("--chunk", type=int, default=256, help="images in a block")
    parser.add_argument("--workers", type=int, help="default: one per device")
    options = parser.parse_args(arguments)
    digits, digit_labels = load_digits()

    with (
        daskinfer.LocalCluster(n_workers=options.workers) as cluster,
        Client(cluster) as client,
    ):
        model = daskinfer.deploy(
            client, factory="daskinfer.demo.digits:load_model", name="digits"
        )
        source = da.from_array(digits, chunks=(options.chunk, 1, 8, 8))
        images = da.concatenate([source] * options.repeat)
        labels = np.tile(digit_labels, options.repeat)

        logits = model.predict(images)
        print(f"{images.shape[0]:,} images in {images.numblocks[0]} blocks")
        right = (logits.argmax(axis=1) == labels).mean()
        print(f"predict:    {right.compute():.2%} right")

        logits = images.map_blocks(
            model,
            dtype=np.float32,
            drop_axis=(1, 2, 3),
            new_axis=1,
            chunks=(images.chunks[0], (10,)),
        )
        right = (logits.argmax(axis=1) == labels).mean()
        print(f"map_blocks: {right.compute():.2%} right")


if __name__ == "__main__":
    main()
