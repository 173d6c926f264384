"""Models that workers build, for tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def add(amount: float = 1.0) -> Callable[[Any], Any]:
    def answer(x: Any) -> Any:
        return x + amount

    return answer


def broken() -> Any:
    raise RuntimeError("these weights\nare no good")
