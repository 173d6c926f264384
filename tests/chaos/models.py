"""What is deployed: models that do as their inputs say."""

from __future__ import annotations

import ctypes
import os
import time

import numpy as np

from tests.chaos.plan import Code

#: Rows that fit the memory of the device that ``tight`` pretends to have.
FITTING = 5

HOLD_SECONDS = 5


class Obedient:
    """Answers ``2 x + 1`` of an input's first column; the second one is its code.

    An answer is itself an input, which is good.

    Parameters
    ----------
    seconds
        What a pass takes.
    fitting
        Rows that the device's memory has room for; None: any number.
    """

    def __init__(self, seconds: float, fitting: int | None = None) -> None:
        self.seconds = seconds
        self.fitting = fitting

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if self.fitting is not None and len(x) > self.fitting:
            # As the allocator of torch says it.
            raise RuntimeError(
                f"DefaultCPUAllocator: can't allocate memory for {len(x)} rows"
            )
        codes = x[:, 1]
        if (codes == Code.EXITS.value).any():
            os._exit(1)
        if (codes == Code.HOLDS.value).any():
            # A call that does not give the interpreter away.
            ctypes.PyDLL(None).sleep(HOLD_SECONDS)
        if (codes == Code.RAISES.value).any():
            raise ArithmeticError(f"no such row among {len(x)}")
        time.sleep(self.seconds)
        return np.stack([x[:, 0] * 2 + 1, np.zeros(len(x))], axis=1)


def build(name: str) -> Obedient:
    """Make the model of a deployment."""
    if name == "tight":
        return Obedient(0.005, FITTING)
    return Obedient(0.05 if name == "slow" else 0.005)


def warmup(name: str) -> np.ndarray | None:
    """The example that a deployment is warmed with, if it is."""
    return None if name == "tight" else row(0, Code.GOOD)


def row(value: int, code: Code) -> np.ndarray:
    """Make an input of one row."""
    return np.array([[value, code.value]], np.float64)


def answer(value: float, times: int = 1) -> float:
    """What the model answers to a value, or to its own answer.

    >>> answer(10), answer(10, times=2)
    (21.0, 43.0)
    """
    for _ in range(times):
        value = 2.0 * value + 1.0
    return value
