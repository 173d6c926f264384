"""The networks that are measured; the workers build them by name."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from distributed import get_worker
from torch import nn

import daskinfer

Net = TypeVar("Net", bound=nn.Module)


def tiny() -> nn.Module:
    """One dense layer, (n, 784) to (n, 10): next to no work."""
    return _seeded(lambda: nn.Linear(784, 10))


def mlp() -> nn.Module:
    """Wide dense layers, (n, 784) to (n, 10).

    A pass reads 80 MB of weights however many rows it has, so batching pays a lot.
    """
    return _seeded(
        lambda: nn.Sequential(
            nn.Linear(784, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 10),
        )
    )


def transformer() -> nn.Module:
    """Two encoder layers, (n, 64, 128) to the same: time grows with the rows."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            128, nhead=4, dim_feedforward=256, batch_first=True
        )
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    return _seeded(build)


def wide_conv() -> nn.Module:
    """Convolutions at full resolution, (n, 3, 48, 48) to (n, 10).

    Every layer writes 576 KiB a row: beyond a few rows they leave the cache, and
    throughput falls again.
    """
    return _seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3, padding=1, groups=64),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3, padding=1, groups=64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    )


class SteadyDevice:
    """Takes a constant time for any batch, as a device that leaves the CPU alone."""

    def __init__(self, seconds: float = 0.010) -> None:
        self.seconds = seconds

    def __call__(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the batch after the time."""
        time.sleep(self.seconds)
        return x


class RowDevice:
    """Takes a constant time for each row, and leaves the CPU alone."""

    def __init__(self, seconds: float = 0.010) -> None:
        self.seconds = seconds

    def __call__(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the batch after the time."""
        time.sleep(self.seconds * len(x))
        return x


class UnevenDevice:
    """Takes 20 ms for any batch, and ten times that on some workers."""

    seconds = 0.020

    def __init__(self, slow: Iterable[str]) -> None:
        self.slow = frozenset(slow)

    def __call__(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the batch after the time."""
        is_slow = get_worker().address in self.slow
        time.sleep(self.seconds * (10 if is_slow else 1))
        return x


def _seeded(build: Callable[[], Net]) -> Net:
    torch.manual_seed(0)
    return build().eval()


@functools.cache
def _loaded_tiny() -> nn.Module:
    return tiny()


def plain_tiny(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Run :func:`tiny`, loaded once on each worker: the task of plain Dask."""
    with torch.inference_mode():
        output: torch.Tensor = _loaded_tiny()(torch.from_numpy(x))
    return output.numpy()


class Talker(nn.Module):
    """Says so many tokens one after the other, a pass through its layers for each.

    The input is int64 of shape (n, 1): how many tokens each row is to say. With
    ``seconds``, a step takes as long for any number of rows and leaves the CPU alone,
    as one on an accelerator does that has to read its weights; else as long as the
    arithmetic takes.
    """

    def __init__(self, width: int, seconds: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.seconds = seconds
        self.cell = nn.GRUCell(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def start(self, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        """Begin to talk."""
        memory = torch.zeros(len(lengths), self.width)
        return {"memory": memory, "left": lengths[:, 0]}

    def step(self, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Say one token."""
        time.sleep(self.seconds)
        memory = self.cell(self.wide(state["memory"]), state["memory"])
        left = state["left"] - 1
        state |= {"memory": memory, "left": left}
        return memory[:, :1].clone(), left <= 0


class StaticTalker(nn.Module):
    """The same as a generator: who shares a batch at its start shares it to the end."""

    def __init__(self, talker: Talker) -> None:
        super().__init__()
        self.talker = talker

    def stream(self, lengths: torch.Tensor) -> Iterator[daskinfer.Step]:
        """Talk until nobody has anything to say."""
        state = self.talker.start(lengths)
        while len(state["left"]):
            outputs, finished = self.talker.step(state)
            yield daskinfer.Step(outputs, finished)
            # Those that have ended cost nothing more.
            state = {name: rows[~finished] for name, rows in state.items()}


def steady_talker() -> Talker:
    """Talk in steps of 5 ms, on what leaves the CPU alone."""
    return _seeded(lambda: Talker(64, 0.005))


def wide_talker() -> Talker:
    """Talk through 64 MB of weights."""
    return _seeded(lambda: Talker(1024))


def static_talker() -> StaticTalker:
    """Talk in batches that nobody joins."""
    return StaticTalker(steady_talker())
