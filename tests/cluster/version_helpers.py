"""Models that say which version they are, and looks at who answered."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
from distributed import Future, Scheduler, Worker

import daskinfer
from daskinfer import Model
from tests.cluster.helpers import PATIENCE, Builder, Local
from tests.cluster.scheduling_helpers import ONE, engine

#: Tells to :func:`make` what to build.
FACTORY = f"{__name__}:make"


class Says(Local):
    """A model whose answers are all one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.full_like(x, self.number)


class LaterOnes(Builder):
    """What holds back all builds but the first."""

    def __init__(self, number: float, failures: int = 0) -> None:
        super().__init__(failures, is_open=False)
        self.number = number
        self._lock = threading.Lock()

    def build(self) -> Any:
        with self._lock:
            self.built += 1
            number = self.built
        if number <= self.failures:
            raise ArithmeticError(f"cannot build number {number}")
        if number > self.failures + 1 and not self._gate.wait(PATIENCE):
            raise TimeoutError("the test never opened its builder")
        return Says(self.number)


def make(builder: Builder) -> Any:
    return builder.build()


async def versions_of(futures: list[Future[Any]]) -> list[str]:
    """Which version answered each of them."""
    told = await asyncio.gather(*(daskinfer.info(future) for future in futures))
    return [info.version for info in told]


async def version_now(model: Model, **options: Any) -> str:
    """Which version answers a request that is sent now; its answer must be its own."""
    future = model.options(**options).submit(ONE)
    answer = await future
    version = (await daskinfer.info(future)).version
    assert answer[0, 0] == float(version)
    return version


def resident(*workers: Worker) -> list[set[str]]:
    """Labels of what each worker has in memory."""
    return [
        {version for _, version in worker.plugins["daskinfer-runtime"].loader.models}  # type: ignore[attr-defined]
        for worker in workers
    ]


def active(scheduler: Scheduler, name: str = "m") -> str:
    """The version that answers."""
    return engine(scheduler).registry.deployment(name).active
