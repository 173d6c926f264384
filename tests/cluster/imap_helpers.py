"""Inputs for imap, and what becomes of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2

orders = pytest.mark.parametrize("ordered", [True, False])


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def values(results: list[Any]) -> list[float]:
    return [float(result[0, 0]) for result in results]


class Source:
    """Inputs without end, which tell how many were read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        for number in itertools.count():
            self.read = number + 1
            yield row(number)


async def rest(results: AsyncIterator[Any]) -> list[Any]:
    return [result async for result in results]


async def first(results: AsyncIterator[Any], count: int) -> list[Any]:
    return [await anext(results) for _ in range(count)]


def reading_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "daskinfer-imap"]
