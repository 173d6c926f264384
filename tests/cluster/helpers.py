"""Models whose calls a test can watch and hold back, for clusters in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import dask
import torch
from distributed.utils_test import async_poll_for

#: Generous: only a test that fails waits that long.
PATIENCE = 30
#: What addresses begin with: ``tls://`` where the tests are run over TLS.
SCHEME = dask.config.get("distributed.comm.default-scheme") + "://"


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; the event loop goes on meanwhile."""
    await async_poll_for(condition, PATIENCE)


class Local:
    """An object that is itself again after a pickle round trip in this process."""

    # For good: a worker that joins late may load one that nobody else holds.
    _known: ClassVar[dict[int, Local]] = {}

    def __reduce__(self) -> tuple[Callable[[int], Local], tuple[int]]:
        self._known[id(self)] = self
        return _find, (id(self),)


def _find(number: int) -> Local:
    return Local._known[number]


class Probe(Local):
    """A model that notes its calls and can be held back.

    Parameters
    ----------
    function
        What it computes; twice its input by default.
    is_open
        Whether calls run at once. Else each waits until :meth:`open`.

    Attributes
    ----------
    calls
        ``(args, kwargs)`` of each call that has begun, warm-up included.
    """

    def __init__(
        self, function: Callable[..., Any] | None = None, is_open: bool = True
    ) -> None:
        self._function = function or (lambda x: x * 2)
        self._gate = threading.Event()
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        if is_open:
            self.open()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if not self._gate.wait(PATIENCE):
            raise TimeoutError("the test never opened its probe")
        return self._function(*args, **kwargs)

    @property
    def rows(self) -> list[int]:
        """Rows of the first input of each call."""
        return [len(args[0]) for args, _ in self.calls]

    def open(self) -> None:
        """Let all calls pass, those of the future too."""
        self._gate.set()

    def close(self) -> None:
        """Hold back calls from now on."""
        self._gate.clear()

    async def entered(self, calls: int = 1) -> None:
        """Wait until so many calls have begun."""
        await until(lambda: len(self.calls) >= calls)


def linear(inputs: int = 4, outputs: int = 3, seed: int = 0) -> torch.nn.Linear:
    """A small network with the same weights every time, in any thread."""
    net = torch.nn.Linear(inputs, outputs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return net


class Builder(Local):
    """What :func:`build` does on the workers: fail at first, or wait to be opened."""

    def __init__(self, failures: int = 0, is_open: bool = True) -> None:
        self.failures = failures
        self.built = 0
        self._gate = threading.Event()
        if is_open:
            self.open()

    def open(self) -> None:
        self._gate.set()

    def build(self) -> Any:
        self.built += 1
        if self.built <= self.failures:
            raise ArithmeticError(f"cannot build number {self.built}")
        if not self._gate.wait(PATIENCE):
            raise TimeoutError("the test never opened its builder")
        return linear()


def build(builder: Builder) -> Any:
    return builder.build()


#: To be given as ``factory=``, with ``factory_kwargs={"builder": Builder()}``.
FACTORY = f"{__name__}:build"
