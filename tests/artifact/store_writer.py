"""What other processes do with a store."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from daskinfer.artifact.chunks import Chunks
from daskinfer.artifact.store import Store

CHUNK = 64 * 1024


def weights_of(number: int, chunks: int = 16) -> memoryview:
    generator = np.random.default_rng(number)
    return memoryview(generator.bytes(chunks * CHUNK - 100))


def chunks_of(number: int) -> Chunks:
    return Chunks.of(weights_of(number), CHUNK)


def write(directory: str, number: int, said: Connection) -> None:
    """Write weights, chunk by chunk in any order, and say each; then the next ones."""
    store = Store(Path(directory), 2**30)
    while True:
        weights, chunks = weights_of(number), chunks_of(number)
        partial = store.begin(chunks)
        assert partial is not None
        said.send(("begun", number, sorted(partial.whole)))
        missing = list(set(range(len(chunks))) - partial.whole)
        random.shuffle(missing)
        for index in missing:
            assert partial.write(index, weights[slice(*chunks.span(index))])
            said.send(("written", number, index))
        store.finish(partial)
        said.send(("finished", number, None))
        number += 1


def hold(directory: str, number: int, said: Connection) -> None:
    """Map weights, and keep them until this is killed."""
    held = Store(Path(directory), 2**30).open(chunks_of(number))
    assert held is not None
    said.send("held")
    said.recv()
