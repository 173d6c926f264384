"""Models that answer piece by piece, without a cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from daskinfer import OutputMismatch
from daskinfer.streaming import Step
from daskinfer.worker.execution import BatchRun, Item, PassSizes
from daskinfer.worker.flow import Flow
from daskinfer.worker.generating import GeneratorProducer
from daskinfer.worker.producing import Emission


def items(*keys: str) -> list[Item]:
    return [Item(key, lambda: ((), {})) for key in keys]


def alone(outputs: Iterator[Any], key: str = "a") -> Flow:
    return Flow(outputs, items(key))


def drained(producer: GeneratorProducer, **paused: Any) -> dict[Any, Emission]:
    """All that a producer gives until it has ended."""
    found: dict[Any, Emission] = {}
    while producer.live:
        for emission in producer.advance(0.0, **paused):
            known = found.setdefault(emission.key, emission)
            if known is not emission:
                assert not known.ended
                known.chunks += emission.chunks
                known.ended, known.error = emission.ended, emission.error
    return found


def test_an_iterator_is_taken_one_output_at_a_time() -> None:
    producer = GeneratorProducer([alone(iter("xyz"))])
    first = producer.advance(0.0)
    assert [(e.key, e.chunks, e.ended) for e in first] == [("a", ["x"], False)]
    assert producer.live == ["a"]
    rest = producer.advance(60.0)
    assert [(e.key, e.chunks, e.ended) for e in rest] == [("a", ["y", "z"], True)]
    assert producer.live == []
    assert producer.advance(60.0) == []


def test_no_outputs_are_a_valid_stream() -> None:
    producer = GeneratorProducer([alone(iter(()))])
    assert producer.advance(0.0) == [Emission("a", [], True)]


def test_what_is_yielded_may_be_used_again_by_the_model() -> None:
    def reusing() -> Iterator[dict[str, np.ndarray]]:
        buffer = np.zeros(2)
        for i in range(3):
            buffer[:] = i
            yield {"y": buffer}

    producer = GeneratorProducer([alone(reusing())])
    (emission,) = producer.advance(60.0)
    assert [chunk["y"].tolist() for chunk in emission.chunks] == [
        [0, 0],
        [1, 1],
        [2, 2],
    ]


def test_a_batch_is_divided_by_rows_without_the_padding() -> None:
    outputs = iter([np.arange(4), np.arange(4) + 10])
    flow = Flow(outputs, items("a", "b"), [1, 2], padding=1)
    found = drained(GeneratorProducer([flow]))
    assert [c.tolist() for c in found["a"].chunks] == [[0], [10]]
    assert [c.tolist() for c in found["b"].chunks] == [[1, 2], [11, 12]]


def test_samples_are_stacked() -> None:
    flow = Flow(iter([["x", "y"]]), items("a", "b"), [1, 1], batch_dim=None)
    found = drained(GeneratorProducer([flow]))
    assert (found["a"].chunks, found["b"].chunks) == (["x"], ["y"])


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(0, 3),
    st.sets(st.integers(0, 5)),
)
def test_each_request_ends_on_its_own(
    lengths: list[int], padding: int, dropped: set[int]
) -> None:
    """Rows of others never come instead, whatever ends or is dropped before."""

    def model() -> Iterator[Step]:
        rows = [(i, length) for i, length in enumerate(lengths)] + [(-1, 2)] * padding
        step = 0
        while rows:
            step += 1
            done = [length == step for _, length in rows]
            yield Step(np.array([[i, step] for i, _ in rows]), torch.tensor(done))
            rows = [row for row, is_done in zip(rows, done, strict=True) if not is_done]

    flow = Flow(
        model(), items(*map(str, range(len(lengths)))), [1] * len(lengths), 0, padding
    )
    producer = GeneratorProducer([flow])
    first = {e.key: e for e in producer.advance(0.0)}
    producer.drop([str(i) for i in dropped])
    found = drained(producer)
    for i, length in enumerate(lengths):
        key = str(i)
        chunks = first[key].chunks + (found[key].chunks if key in found else [])
        wanted = 1 if i in dropped else length
        assert [c.tolist() for c in chunks] == [[[i, s + 1]] for s in range(wanted)]
        if i not in dropped:
            assert found.get(key, first[key]).ended


def test_a_request_of_several_rows_ends_with_the_last() -> None:
    steps = [Step(np.array([1, 2]), [False, True]), Step(np.array([3]), [True])]
    found = drained(GeneratorProducer([Flow(iter(steps), items("a"), [2])]))
    assert [chunk.tolist() for chunk in found["a"].chunks] == [[1, 2], [3]]


def test_a_step_that_tells_of_other_rows_than_there_are_is_refused() -> None:
    flow = Flow(iter([Step(np.zeros(2), [True])]), items("a", "b"), [1, 1])
    emissions = GeneratorProducer([flow]).advance(0.0)
    assert [e.key for e in emissions] == ["a", "b"]
    for emission in emissions:
        assert isinstance(emission.error, OutputMismatch)
        assert "1 entry where 2 rows are live" in str(emission.error)


def test_outputs_before_an_error_are_given() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise KeyError("no")

    producer = GeneratorProducer([alone(failing()), alone(iter([5, 6]), "b")])
    found = {e.key: e for e in producer.advance(60.0)}
    assert (found["a"].chunks, found["a"].ended) == ([1], True)
    assert isinstance(found["a"].error, KeyError)
    assert (found["b"].chunks, found["b"].error) == ([5, 6], None)


def test_a_model_cannot_end_its_process() -> None:
    def leaving() -> Iterator[int]:
        yield 1
        raise SystemExit

    (emission,) = GeneratorProducer([alone(leaving())]).advance(60.0)
    assert "would end its process" in str(emission.error)


def test_a_generator_is_closed_when_nobody_wants_it() -> None:
    closed: list[str] = []

    def endless(name: str) -> Iterator[np.ndarray]:
        try:
            while True:
                yield np.zeros(2)
        finally:
            closed.append(name)

    producer = GeneratorProducer(
        [
            Flow(endless("first"), items("a", "b"), [1, 1]),
            Flow(endless("second"), items("c"), [2]),
        ]
    )
    producer.advance(0.0)
    producer.advance(0.0)
    producer.drop(["a", "unknown"])
    assert (closed, sorted(producer.live)) == ([], ["b", "c"])
    assert {e.key for e in producer.advance(0.0)} | {
        e.key for e in producer.advance(0.0)
    } == {"b", "c"}
    producer.drop(["b"])
    assert (closed, producer.live) == (["first"], ["c"])
    producer.close()
    assert (closed, producer.live) == (["first", "second"], [])


def test_a_generator_that_fails_as_it_is_closed_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stubborn() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise ArithmeticError("never")

    producer = GeneratorProducer([alone(stubborn())])
    producer.advance(0.0)
    with caplog.at_level(logging.INFO, logger="distributed.inference.flow"):
        producer.drop(["a"])
    assert "ArithmeticError" in caplog.text
    assert producer.live == []


def test_what_is_told_of_it_says_which_batch_it_was_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stubborn(x: np.ndarray) -> Iterator[np.ndarray]:
        try:
            yield x
            yield x
        finally:
            raise ArithmeticError("never")

    about = {"deployment": "m", "version": "1", "stimulus_id": "daskinfer-run-m-7"}
    end = "[deployment='m' version='1' stimulus_id='daskinfer-run-m-7']"
    # Alone in a pass, as a part of one, and in several passes.
    for x in (np.int64(1), np.zeros((1, 1)), np.zeros((3, 1))):
        caplog.clear()
        item = Item("a", lambda x=x: ((x,), {}))
        run = BatchRun(stubborn, 0, PassSizes(2), about=about)
        (flow,) = run([item]).flows
        with caplog.at_level(logging.INFO, logger="distributed.inference.flow"):
            flow.drop(["a"])
        told = [record.getMessage() for record in caplog.records]
        assert told and all(line.endswith(end) for line in told), (x, told)


def test_iterators_take_turns() -> None:
    producer = GeneratorProducer([alone(iter("xy")), alone(iter("uv"), "b")])
    order = [producer.advance(0.0)[0].key for _ in range(4)]
    assert order == ["a", "b", "a", "b"]


def test_a_reader_that_has_enough_pauses_its_own_iterator() -> None:
    producer = GeneratorProducer([alone(iter("xy")), alone(iter("uv"), "b")])
    found = producer.advance(60.0, paused={"a"})
    assert [(e.key, e.chunks) for e in found] == [("b", ["u", "v"])]
    assert producer.advance(60.0, paused={"a"}) == []
    assert [e.chunks for e in producer.advance(60.0)] == [["x", "y"]]


def test_a_reader_that_has_enough_does_not_pause_others_of_its_batch() -> None:
    flow = Flow(iter([np.array([1, 2])]), items("a", "b"), [1, 1])
    producer = GeneratorProducer([flow])
    found = producer.advance(60.0, paused={"a"})
    assert {e.key for e in found} == {"a", "b"}
