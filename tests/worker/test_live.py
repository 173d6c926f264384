"""One stream on a worker: what comes before its end is read before it."""

from __future__ import annotations

from typing import Any

import pytest

from daskinfer import transport
from daskinfer.protocol import StreamOrder
from daskinfer.worker.live import Live, Part
from daskinfer.worker.producing import Emission


class Stubborn:
    """It cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("not this one")


class Unsized:
    """Its size cannot be told."""

    def __sizeof__(self) -> int:
        raise ArithmeticError("it has no size")


def live(chunks: int = 100) -> Live:
    order: StreamOrder = {
        "read": True,
        "nbytes": 10_000,
        "chunks": chunks,
        "keep": True,
        "combine": None,
        "replay": False,
        "skip": 0,
    }
    return Live("k", order)


def read(part: Part | None) -> list[Any]:
    assert part is not None
    return list(transport.unpack(part.pack["header"], part.pack["frames"]))


@pytest.mark.parametrize(
    ("bad", "kind"), [(Stubborn(), ValueError), (Unsized(), ArithmeticError)]
)
@pytest.mark.parametrize("ended", [False, True])
def test_chunks_before_one_that_cannot_be_sent_are(
    bad: Any, kind: type[Exception], ended: bool
) -> None:
    stream = live()
    stream.take(Emission("k", [1, 2, bad, 3], ended))
    part = stream.part()
    assert read(part) == [1, 2]
    assert part is not None and (part.first, part.count, part.more) == (0, 2, False)
    assert part.nbytes < 100
    assert isinstance(stream.error, kind) and stream.is_over
    assert stream.part() is None


@pytest.mark.parametrize("bad", [Stubborn(), Unsized()])
def test_first_one_cannot_be_sent(bad: Any) -> None:
    stream = live()
    stream.take(Emission("k", [bad, 1]))
    assert stream.part() is None
    assert stream.error is not None and stream.is_over


def test_who_fails_is_over_when_all_before_is_sent() -> None:
    stream = live(chunks=2)
    stream.take(Emission("k", [1, 2, 3]))
    assert read(stream.part()) == [1, 2]
    error = TimeoutError("it stalls")
    stream.fail(error)
    assert not stream.is_over
    stream.taken(2)
    assert read(stream.part()) == [3]
    assert stream.is_over and stream.error is error
