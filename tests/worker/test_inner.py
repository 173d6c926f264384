"""Models that other models call, without a cluster: as if on the device's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.device import open_device
from daskinfer.exceptions import DeadlineExceeded
from daskinfer.options import NO_OPTIONS, CallOptions
from daskinfer.protocol import STEPS
from daskinfer.worker.inner import call_inner, stream_inner
from daskinfer.worker.iterating import kind_of
from daskinfer.worker.models import ResidentModel
from tests.worker.step_models import Attention


def resident(function: Any, kind: str | None = None) -> ResidentModel:
    return ResidentModel(
        "inner",
        "1",
        function,
        open_device("cpu"),
        isinstance(function, torch.nn.Module),
        "digest",
        {},
        8,
        0,
        None,
        kind=kind_of(function, False) if kind is None else kind,
    )


class Counting:
    """Counts up, and knows how many numbers it has given and whether it was left."""

    def __init__(self) -> None:
        self.given = self.left = 0

    def __call__(self, n: int) -> Iterator[int]:
        try:
            for i in range(n):
                self.given += 1
                yield i
        finally:
            self.left += 1


class Awaiting(Counting):
    """The same, after having awaited something."""

    async def __call__(self, n: int) -> AsyncIterator[int]:  # type: ignore[override]
        try:
            for i in range(n):
                await asyncio.sleep(0)
                self.given += 1
                yield i
        finally:
            await asyncio.sleep(0)
            self.left += 1


class Numbers:
    """An iterator that is no generator: nobody but who leaves it closes it."""

    def __init__(self) -> None:
        self.left = 0

    def __call__(self, n: int) -> Numbers:
        self.numbers = iter(range(n))
        return self

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        return next(self.numbers)

    def close(self) -> None:
        self.left += 1


class AwaitedNumbers(Numbers):
    """The same, awaited."""

    __iter__ = __next__ = None  # type: ignore[assignment]

    def __aiter__(self) -> AwaitedNumbers:
        return self

    async def __anext__(self) -> int:
        await asyncio.sleep(0)
        for number in self.numbers:
            return number
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.left += 1


def call(*args: Any) -> Any:
    return args, {}


@pytest.mark.parametrize("kind", [Counting, Awaiting])
def test_whole_is_what_its_options_make_of_it(kind: Any) -> None:
    model = resident(kind())
    assert list(stream_inner(model, NO_OPTIONS, call(3))) == [0, 1, 2]
    assert list(stream_inner(model, NO_OPTIONS, call(0))) == []
    assert call_inner(model, NO_OPTIONS, call(3)) == [0, 1, 2]
    assert call_inner(model, CallOptions(combine=sum), call(4)) == 6
    assert call_inner(model, CallOptions(keep=False), call(4)) is None
    assert model.function.left == 5


@pytest.mark.parametrize("kind", [Counting, Awaiting])
def test_who_leaves_has_the_model_stop(kind: Any) -> None:
    model = resident(kind())
    with stream_inner(model, NO_OPTIONS, call(9)) as stream:
        assert next(stream) == 0
        assert model.function.left == 0
    assert (model.function.given, model.function.left) == (1, 1)
    assert list(stream) == []
    stream.close()
    for chunk in stream_inner(model, NO_OPTIONS, call(9)):
        assert chunk == 0
        break
    assert (model.function.given, model.function.left) == (2, 2)


@pytest.mark.parametrize("kind", [Numbers, AwaitedNumbers])
def test_iterators_that_are_no_generators_are_closed(kind: Any) -> None:
    model = resident(kind())
    with stream_inner(model, NO_OPTIONS, call(9)) as stream:
        assert next(stream) == 0
    assert model.function.left == 1
    assert list(stream) == []
    assert call_inner(model, NO_OPTIONS, call(3)) == [0, 1, 2]


def test_it_is_read_in_coroutines_too() -> None:
    model = resident(Counting())

    async def read() -> list[int]:
        async with stream_inner(model, NO_OPTIONS, call(3)) as stream:
            return [chunk async for chunk in stream]

    assert asyncio.run(read()) == [0, 1, 2]


def test_deadline_is_looked_at_before_each_chunk() -> None:
    model = resident(Counting())
    stream = stream_inner(model, CallOptions(timeout=1e-9), call(9))
    with pytest.raises(DeadlineExceeded, match=r"'inner'.* 1e-09 s, and 0 chunks"):
        next(stream)
    assert model.function.left == 1
    assert list(stream_inner(model, CallOptions(timeout=1e9), call(3))) == [0, 1, 2]
    with pytest.raises(DeadlineExceeded):
        call_inner(model, CallOptions(timeout=1e-9), call(9))


def test_what_is_refused() -> None:
    model = resident(Counting())
    with pytest.raises(ValueError, match="key= names a result"):
        stream_inner(model, CallOptions(key="k"), call(3))
    with pytest.raises(RuntimeError, match=r"'inner' has no future.* call the model"):
        _ = stream_inner(model, NO_OPTIONS, call(3)).future
    plain = resident(lambda x: x * 2)
    with pytest.raises(TypeError, match="'inner' does not answer piece by piece"):
        stream_inner(plain, NO_OPTIONS, call(np.ones((2, 2))))
    assert call_inner(plain, NO_OPTIONS, call(np.ones((2, 2)))).tolist() == [[2, 2]] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_errors_come_after_the_chunks_before_them(is_async: bool) -> None:
    def breaks(n: int) -> Iterator[int]:
        yield from range(n)
        raise ArithmeticError("a bad step")

    async def breaks_async(n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        raise ArithmeticError("a bad step")

    stream = stream_inner(
        resident(breaks_async if is_async else breaks), NO_OPTIONS, call(2)
    )
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(ArithmeticError, match="a bad step"):
        next(stream)
    assert list(stream) == []


def test_error_of_the_device_is_raised_as_such(monkeypatch: Any) -> None:
    def breaks(n: int) -> Iterator[int]:
        raise RuntimeError("the device is gone")
        yield n

    model = resident(breaks)
    monkeypatch.setattr(type(model.device), "is_fatal", lambda self, error: True)
    with pytest.raises(RuntimeError, match="the device is gone"):
        stream_inner(model, NO_OPTIONS, call(2))


def test_slots_are_free_when_it_is_left() -> None:
    model = resident(Attention(slots=1), STEPS)
    request = call(torch.tensor([[1, 2]]), torch.tensor([5]))
    with stream_inner(model, NO_OPTIONS, request) as stream:
        next(stream)
        assert model.producer.passes.free == []
    assert model.producer.passes.free == [0]
    said = call_inner(model, NO_OPTIONS, request)
    assert [int(chunk) for chunk in said] == Attention(slots=1).alone([1, 2], 5)


def test_tensors_are_none_of_inference_mode() -> None:
    async def give(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
        yield x * 2

    (chunk,) = stream_inner(resident(give), NO_OPTIONS, call(torch.ones(2, 2)))
    assert chunk.tolist() == [[2, 2], [2, 2]] and not chunk.is_inference()
