"""Continuous batching: whatever shares the steps, each request is told its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.device import open_device
from daskinfer.exceptions import InferenceError, OutputMismatch
from daskinfer.stepping import is_step_model, run_steps
from daskinfer.worker.device_steps import DeviceSteps
from daskinfer.worker.execution import Item
from daskinfer.worker.slots import Slots
from daskinfer.worker.stepping import StepProducer
from tests.worker.step_models import (
    BAD_START,
    BAD_STEP,
    Attention,
    Recurrent,
    recurrent_alone,
)


def item(key: Any, *args: Any, **kwargs: Any) -> Item:
    return Item(key, lambda: (args, kwargs))


def producer_of(
    model: Any,
    max_rows: int = 8,
    allowed: tuple[int, ...] | None = None,
    batch_dim: int | None = 0,
    clock: Callable[[], float] | None = None,
    device: Any = None,
) -> StepProducer:
    steps = DeviceSteps(model, open_device("cpu"))
    slots = Slots(max_rows, allowed, steps.room)
    ticks = count()
    return StepProducer(
        steps,
        slots,
        batch_dim,
        device or open_device("cpu"),
        clock or (lambda: next(ticks) * 1e-3),
    )


@dataclass
class Story:
    """All that a producer has emitted, by request."""

    chunks: dict[Any, list[Any]] = field(default_factory=dict)
    ended: dict[Any, BaseException | None] = field(default_factory=dict)

    def turn(self, producer: StepProducer, paused: Iterable[Any] = ()) -> None:
        for emission in producer.advance(0.0, set(paused)):
            assert emission.key not in self.ended
            self.chunks.setdefault(emission.key, []).extend(emission.chunks)
            if emission.ended:
                self.ended[emission.key] = emission.error

    def run(self, producer: StepProducer) -> Story:
        for _ in range(10_000):
            if not producer.live:
                return self
            self.turn(producer)
        raise AssertionError(f"{producer!r} does not end")


def nothing_is_left(producer: StepProducer) -> bool:
    room = producer.passes._steps.room or 0
    return (
        not producer.live
        and not len(producer.passes.states)
        and sorted(producer.passes.free) == list(range(room))
    )


@dataclass
class Request:
    prompt: list[int]
    steps: int
    rows: int
    arrives: int
    leaves: int | None
    pauses: set[int]
    #: A bad one is refused at its start, or at its last step.
    bad: int | None

    def item(self, key: int) -> Item:
        prompt = torch.tensor([self.prompt] * self.rows)
        return item(key, prompt, torch.full((self.rows,), self.steps))


def requests() -> st.SearchStrategy[list[Request]]:
    bad = st.sampled_from([None, None, None, None, BAD_START, BAD_STEP])
    leaves = st.one_of(st.none(), st.none(), st.integers(0, 20))

    def build(
        prompt: list[int],
        steps: int,
        rows: int,
        arrives: int,
        leaves: int | None,
        pauses: set[int],
        bad: int | None,
    ) -> Request:
        if bad is not None:
            prompt = [bad, *prompt[1:]]
        return Request(prompt, steps, rows, arrives, leaves, pauses, bad)

    one = st.builds(
        build,
        st.lists(st.integers(0, 14), min_size=1, max_size=4),
        st.integers(1, 9),
        st.sampled_from([1, 1, 1, 2]),
        st.integers(0, 12),
        leaves,
        st.sets(st.integers(0, 20), max_size=6),
        bad,
    )
    return st.lists(one, min_size=1, max_size=10)


def padding() -> st.SearchStrategy[tuple[int, tuple[int, ...] | None]]:
    return st.sampled_from(
        [(2, None), (3, None), (8, None), (4, (2, 4)), (8, (1, 3, 8)), (6, (6,))]
    )


def ticking(data: st.DataObject) -> Callable[[], float]:
    """A clock by which passes take whatever they may take."""
    lengths: Iterator[float] = iter(
        data.draw(st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=30))
    )
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += next(lengths, 1e-3)
        return now

    return clock


def check(
    producer: StepProducer,
    wanted: list[Request],
    alone: Callable[[list[int], int], list[int]],
) -> None:
    story = Story()
    dropped: dict[int, int] = {}
    for turn in range(25):
        producer.add([r.item(k) for k, r in enumerate(wanted) if r.arrives == turn])
        for key, request in enumerate(wanted):
            has_come = request.arrives <= turn and key not in story.ended
            if request.leaves == turn and has_come:
                producer.drop([key])
                dropped[key] = len(story.chunks.get(key, []))
        story.turn(producer, {k for k, r in enumerate(wanted) if turn in r.pauses})
    story.run(producer)
    assert nothing_is_left(producer)
    for key, request in enumerate(wanted):
        said = [chunk.tolist() for chunk in story.chunks.get(key, [])]
        tokens = alone(request.prompt, request.steps)
        expected = [[token] * request.rows for token in tokens]
        if key in dropped:
            assert key not in story.ended
            assert said == expected[: dropped[key]]
            continue
        error = story.ended[key]
        if request.bad is None:
            assert error is None
            assert said == expected
        else:
            assert isinstance(error, ValueError)
            at_start = request.bad == BAD_START
            assert said == ([] if at_start else expected[:-1])


@settings(max_examples=150, deadline=None)
@given(requests(), padding(), st.data())
def test_recurrent_model_says_what_it_says_alone(
    wanted: list[Request], sizes: tuple[int, Any], data: st.DataObject
) -> None:
    model = Recurrent()
    producer = producer_of(model, *sizes, clock=ticking(data))
    check(producer, wanted, lambda *about: recurrent_alone(model, *about))
    assert set(model.rows) <= set(sizes[1] or range(1, sizes[0] + 1))


@settings(max_examples=150, deadline=None)
@given(requests(), padding(), st.integers(2, 9), st.data())
def test_cache_by_slots_says_what_it_says_alone(
    wanted: list[Request], sizes: tuple[int, Any], room: int, data: st.DataObject
) -> None:
    model = Attention(room)
    producer = producer_of(model, *sizes, clock=ticking(data))
    check(producer, wanted, model.alone)


def test_padding_writes_into_no_slot_of_others() -> None:
    model = Attention(slots=8)
    producer = producer_of(model, allowed=(8,))
    prompts = [[1, 2], [3, 4], [5, 6]]
    steps = torch.tensor([4])
    producer.add([item(k, torch.tensor([p]), steps) for k, p in enumerate(prompts)])
    story = Story().run(producer)
    assert set(model.rows) == {8}
    for key, prompt in enumerate(prompts):
        assert [int(c) for c in story.chunks[key]] == model.alone(prompt, 4)


class Countdown:
    """Counts down from its input, in arrays, with whatever state is asked for."""

    def __init__(
        self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> None:
        self.pack = pack
        self.unpack = unpack
        self.starts: list[int] = []
        self.rows: list[int] = []

    def start(self, left: Any) -> Any:
        self.starts.append(len(left))
        return self.pack(left)

    def step(self, state: Any) -> Any:
        left = self.unpack(state) - 1
        self.rows.append(len(left))
        return {"left": left}, left <= 0, self.pack(left)


class Named(NamedTuple):
    left: Any
    note: str


@dataclass(frozen=True)
class Frozen:
    left: Any
    nested: list[Any]


def told(story: Story, key: Any) -> list[Any]:
    return [chunk["left"].tolist() for chunk in story.chunks[key]]


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [
        (lambda left: left, lambda state: state),
        (lambda left: {"a": [left, left]}, lambda state: state["a"][1]),
        (lambda left: (left, None, 3), lambda state: state[0]),
        (lambda left: Named(left, "a constant"), lambda state: state.left),
        (lambda left: Frozen(left, [left * 2]), lambda state: state.nested[0] // 2),
        (lambda left: {"a": left.tolist()}, lambda state: np.array(state["a"])),
    ],
    ids=["array", "dict", "tuple", "named tuple", "dataclass", "list of entries"],
)
def test_states_may_be_any_tree(pack: Any, unpack: Any) -> None:
    model = Countdown(pack, unpack)
    producer = producer_of(model, allowed=(1, 4, 8))
    producer.add([item("a", np.array([3, 1])), item("b", np.array([2]))])
    story = Story().run(producer)
    assert told(story, "a") == [[2, 0], [1, -1], [0, -2]]
    assert told(story, "b") == [[1], [0]]
    assert story.ended == {"a": None, "b": None}
    assert model.starts == [4] and model.rows == [4, 4, 4]
    assert nothing_is_left(producer)


def counting(**kwargs: Any) -> tuple[Countdown, StepProducer]:
    model = Countdown(lambda left: left, lambda state: state)
    return model, producer_of(model, **kwargs)


def test_who_comes_later_joins_at_the_next_step_and_a_short_one_leaves() -> None:
    model, producer = counting()
    story = Story()
    producer.add([item("long", np.array([6]))])
    story.turn(producer)
    producer.add([item("short", np.array([2]))])
    story.turn(producer)
    story.turn(producer)
    assert story.ended == {"short": None}
    story.run(producer)
    assert model.rows == [1, 2, 2, 1, 1, 1]
    assert len(story.chunks["long"]) == 6


def test_first_chunk_leaves_at_once_and_then_the_budget_is_used() -> None:
    now = 0.0
    _model, producer = counting(clock=lambda: now)
    producer.add([item("a", np.array([50]))])
    assert [len(e.chunks) for e in producer.advance(1.0)] == [1]
    assert [len(e.chunks) for e in producer.advance(1.0)] == [49]


def test_budget_ends_between_steps() -> None:
    ticks = count()
    _model, producer = counting(clock=lambda: float(next(ticks)))
    producer.add([item("a", np.array([500]))])
    producer.advance(0.0)
    (emission,) = producer.advance(50.0)
    assert 2 <= len(emission.chunks) <= 25


def test_paused_one_sits_out_and_the_others_go_on() -> None:
    _model, producer = counting()
    story = Story()
    producer.add([item("slow", np.array([3])), item("b", np.array([3]))])
    story.turn(producer)
    story.turn(producer, ["slow"])
    story.turn(producer, ["slow"])
    assert story.ended == {"b": None}
    assert told(story, "slow") == [[2]]
    assert producer.advance(0.0, ["slow"]) == []
    story.run(producer)
    assert told(story, "slow") == [[2], [1], [0]]


def test_paused_one_gives_its_slot_back_in_the_end_where_others_wait_for_it() -> None:
    producer = producer_of(Attention(slots=1))
    story = Story()
    tokens, steps = torch.tensor([[1, 2]]), torch.tensor([3])
    producer.add([item("slow", tokens, steps), item("next", tokens, steps)])
    for _ in range(20):
        story.turn(producer, ["slow"])
    assert story.ended == {"slow": None, "next": None}


def test_dropped_one_is_told_nothing_more_and_may_come_again() -> None:
    _model, producer = counting()
    story = Story()
    producer.add([item("a", np.array([5])), item("b", np.array([3]))])
    story.turn(producer)
    producer.drop(["a", "unknown"])
    assert producer.live == ["b"]
    producer.add([item("a", np.array([2]))])
    story.run(producer)
    assert told(story, "a") == [[4], [1], [0]]
    assert told(story, "b") == [[2], [1], [0]]


def test_closed_one_holds_nothing() -> None:
    producer = producer_of(Attention(slots=3))
    tokens, steps = torch.tensor([[1, 2]]), torch.tensor([3])
    producer.add([item(key, tokens, steps) for key in range(5)])
    producer.advance(0.0)
    producer.close()
    assert nothing_is_left(producer)
    assert producer.advance(1.0) == []


def test_request_without_rows_has_no_chunks() -> None:
    model, producer = counting()
    producer.add([item("empty", np.zeros(0, int)), item("b", np.array([1]))])
    assert set(producer.live) == {"empty", "b"}
    story = Story().run(producer)
    assert story.chunks["empty"] == []
    assert story.ended == {"empty": None, "b": None}
    assert model.starts == [1]


def test_arrays_are_answered_in_arrays_beside_tensors() -> None:
    model = Recurrent()
    producer = producer_of(model)
    array, tensor = np.array([[1, 2]]), torch.tensor([[1, 2]])
    producer.add(
        [
            item("array", array, np.array([3])),
            item("tensor", tensor, torch.tensor([3])),
        ]
    )
    story = Story().run(producer)
    assert model.rows == [2, 2, 2]
    assert {type(chunk) for chunk in story.chunks["array"]} == {np.ndarray}
    assert {type(chunk) for chunk in story.chunks["tensor"]} == {torch.Tensor}
    assert not any(chunk.is_inference() for chunk in story.chunks["tensor"])


class Speller:
    """Says its text letter by letter, and nothing where there is a blank."""

    def start(self, texts: list[str]) -> dict[str, Any]:
        return {"rest": list(texts)}

    def step(self, state: dict[str, Any]) -> tuple[list[str | None], list[bool]]:
        said = [rest[:1] for rest in state["rest"]]
        state["rest"] = [rest[1:] for rest in state["rest"]]
        letters = [letter if letter != " " else None for letter in said]
        return letters, [not rest for rest in state["rest"]]


def test_samples_are_stacked_and_who_has_none_to_tell_tells_nothing() -> None:
    producer = producer_of(Speller(), batch_dim=None, allowed=(2, 8))
    producer.add([item("a", "a bc"), item("b", "xyz"), item("c", " ")])
    story = Story().run(producer)
    assert story.chunks["a"] == ["a", "b", "c"]
    assert story.chunks["b"] == ["x", "y", "z"]
    assert "c" in story.ended and not story.chunks["c"]


def test_rows_of_lists_give_lists() -> None:
    producer = producer_of(Speller())
    producer.add([item("a", ["ab", "c"])])
    assert Story().run(producer).chunks["a"] == [["a", "c"], ["b", ""]]


def test_state_without_a_batch_axis_steps_alone() -> None:
    class Alone:
        def start(self, x: Any) -> dict[str, Any]:
            return {"x": x, "shared": np.zeros(7)}

        def step(self, state: dict[str, Any]) -> Any:
            state["x"] = state["x"] - 1
            return state["x"], state["x"] == 0

    producer = producer_of(Alone())
    producer.add([item("a", np.array([2])), item("b", np.array([1]))])
    story = Story().run(producer)
    assert [c.tolist() for c in story.chunks["a"]] == [[1], [0]]
    assert [c.tolist() for c in story.chunks["b"]] == [[0]]
    assert nothing_is_left(producer)


def test_states_that_grow_step_apart() -> None:
    class Growing:
        def __init__(self) -> None:
            self.shapes: list[tuple[int, ...]] = []

        def start(self, x: Any) -> Any:
            return {"seen": x[:, None], "end": x}

        def step(self, state: Any) -> Any:
            self.shapes.append(state["seen"].shape)
            last = state["seen"][:, -1:] + 1
            state["seen"] = np.concatenate([state["seen"], last], axis=1)
            return last[:, 0], state["seen"].shape[1] > state["end"] + 1

    model = Growing()
    producer = producer_of(model)
    story = Story()
    producer.add([item("a", np.array([3])), item("b", np.array([3]))])
    story.turn(producer)
    producer.add([item("c", np.array([1]))])
    story.run(producer)
    assert [c.tolist() for c in story.chunks["a"]] == [[4], [5], [6], [7]]
    assert [c.tolist() for c in story.chunks["c"]] == [[2], [3]]
    assert model.shapes[:3] == [(2, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda state: state, "must return"),
        (lambda state: (state, True, state, state), "of length 4"),
        (lambda state: (state, [True]), "one bool for each of 2 rows"),
        (lambda state: (state, [0.5, 0.5]), "must hold bools"),
        (lambda state: (state[:1], False), "has shape"),
        (lambda state: (state, False, state[:1]), "the state has 1 row"),
    ],
)
def test_what_a_step_may_not_return_is_said(step: Any, message: str) -> None:
    class Wrong:
        def start(self, x: Any) -> Any:
            return x

        step: Any

    model = Wrong()
    model.step = step
    producer = producer_of(model)
    producer.add([item("a", np.array([1])), item("b", np.array([2]))])
    story = Story().run(producer)
    for key in "ab":
        with pytest.raises(OutputMismatch, match=message):
            raise story.ended[key] or AssertionError
    assert nothing_is_left(producer)


def test_too_many_rows_are_refused_by_name() -> None:
    _, producer = counting(max_rows=4)
    producer.add([item("a", np.arange(1, 6)), item("b", np.array([1]))])
    story = Story().run(producer)
    assert story.ended["b"] is None
    with pytest.raises(InferenceError, match=r"a request of 5 rows .* than 4 rows"):
        raise story.ended["a"] or AssertionError


def test_inputs_that_cannot_be_read_fail_alone() -> None:
    def broken() -> Any:
        raise KeyError("gone")

    _, producer = counting()
    producer.add([Item("bad", broken), item("good", np.array([1]))])
    story = Story().run(producer)
    assert isinstance(story.ended["bad"], KeyError) and story.ended["good"] is None


class Small:
    """A device with memory for so many rows of a pass."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.emptied = 0

    def check(self, rows: int) -> None:
        if rows > self.rows:
            raise MemoryError(f"no memory for {rows} rows")

    def is_out_of_memory(self, exc: BaseException) -> bool:
        return isinstance(exc, MemoryError)

    def is_fatal(self, exc: BaseException) -> bool:
        return isinstance(exc, ConnectionError)

    def empty_cache(self) -> None:
        self.emptied += 1


class Checked(Countdown):
    """Counts down on a small device; or holds so many rows at most."""

    def __init__(self, device: Small, holds: int = 100) -> None:
        super().__init__(lambda left: left, lambda state: state)
        self.device = device
        self.holds = holds
        self.held: set[int] = set()

    def start(self, left: Any) -> Any:
        self.device.check(len(left) + max(0, 100 - self.holds))
        return super().start(left)

    def step(self, state: Any) -> Any:
        self.device.check(len(state))
        return super().step(state)


def test_steps_without_memory_are_made_in_smaller_passes_from_then_on() -> None:
    device = Small(rows=3)
    model = Checked(device)
    producer = producer_of(model, device=device)
    producer.add([item(key, np.array([4])) for key in range(8)])
    story = Story().run(producer)
    assert all(told(story, key) == [[3], [2], [1], [0]] for key in range(8))
    assert set(story.ended.values()) == {None}
    assert max(model.rows) <= 3
    # It is found out once, not at every step.
    assert device.emptied <= 8
    assert producer.slots.ceiling <= 3


def test_one_that_never_fits_fails_alone() -> None:
    device = Small(rows=3)
    producer = producer_of(Checked(device), device=device)
    producer.add([item("large", np.arange(1, 6)), item("b", np.array([2]))])
    story = Story().run(producer)
    assert isinstance(story.ended["large"], MemoryError)
    assert told(story, "b") == [[1], [0]]


def test_start_waits_for_memory_that_others_hold() -> None:
    device = Small(rows=8)

    class Holding(Checked):
        live = 0

        def start(self, left: Any) -> Any:
            if self.live + len(left) > 2:
                raise MemoryError("no memory for more states")
            self.live += len(left)
            return super().start(left)

        def step(self, state: Any) -> Any:
            outputs, finished, state = super().step(state)
            self.live -= int(finished.sum())
            return outputs, finished, state

    model = Holding(device)
    producer = producer_of(model, device=device)
    producer.add([item(key, np.array([3])) for key in range(6)])
    story = Story().run(producer)
    assert all(told(story, key) == [[2], [1], [0]] for key in range(6))
    assert set(story.ended.values()) == {None}
    assert max(model.rows) == 2


def test_broken_device_ends_nobody() -> None:
    device = Small(rows=8)

    class Dying(Checked):
        def step(self, state: Any) -> Any:
            if len(self.rows) == 2:
                raise ConnectionError("the device is gone")
            return super().step(state)

    producer = producer_of(Dying(device), device=device)
    story = Story()
    producer.add([item("a", np.array([5])), item("b", np.array([5]))])
    for _ in range(4):
        story.turn(producer)
    assert isinstance(producer.broken, ConnectionError)
    assert not story.ended and set(producer.live) == {"a", "b"}
    assert told(story, "a") == [[4], [3]]


def test_model_that_would_end_its_process_fails_alone() -> None:
    class Leaving(Checked):
        def step(self, state: Any) -> Any:
            if (state == 7).any():
                raise SystemExit(3)
            return super().step(state)

    device = Small(rows=8)
    producer = producer_of(Leaving(device), device=device)
    producer.add([item(key, np.array([key])) for key in range(1, 9)])
    story = Story().run(producer)
    failed = {key for key, error in story.ended.items() if error is not None}
    assert failed == {7, 8}
    assert told(story, 8) == [[7]]
    assert told(story, 5) == [[4], [3], [2], [1], [0]]


def test_run_steps_is_what_a_stream_gives() -> None:
    model = Attention(slots=2)
    tokens, steps = np.array([[3, 1, 2]]), np.array([5])
    (first, *_) = run_steps(model, torch.tensor(tokens), torch.tensor(steps))
    assert not first.is_inference() and not first.requires_grad
    chunks = list(run_steps(model, tokens, steps))
    assert [chunk.tolist() for chunk in chunks] == [
        [token] for token in model.alone([3, 1, 2], 5)
    ]
    assert {type(chunk) for chunk in chunks} == {np.ndarray}
    assert list(run_steps(Speller(), "a b", batch_dim=None)) == ["a", "b"]
    assert list(run_steps(Speller(), [])) == []
    with pytest.raises(ValueError, match="do not fit into the model's 2 slots"):
        list(run_steps(model, np.repeat(tokens, 3, axis=0), np.repeat(steps, 3)))


@pytest.mark.parametrize(
    ("slots", "error"), [(0, ValueError), (True, TypeError), ("3", TypeError)]
)
def test_slots_must_be_a_number_of_rows(slots: Any, error: type[Exception]) -> None:
    model = Speller()
    model.slots = slots  # type: ignore[attr-defined]
    with pytest.raises(error, match="slots of a model must be"):
        producer_of(model)


class Wrapping:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_step_models_are_told_from_others() -> None:
    assert is_step_model(Recurrent()) and is_step_model(Speller())
    assert not is_step_model(Speller)
    assert is_step_model(Wrapping(Speller()))
    assert not is_step_model(torch.nn.Linear(1, 1)) and not is_step_model(len)


def test_one_that_another_model_asks_for_runs_alone_between_the_steps() -> None:
    model = Attention(slots=2)
    producer = producer_of(model)
    story = Story()
    prompts = [[1, 2], [3, 4]]
    steps = torch.tensor([4])
    producer.add([item("a", torch.tensor([prompts[0]]), steps)])
    story.turn(producer)
    call = (torch.tensor([prompts[1]]), steps), {}
    said = producer.alone(call)
    first = int(next(said))
    story.turn(producer)
    with pytest.raises(InferenceError, match="has 2 slots, and 0 are free"):
        list(producer.alone(call))
    assert [first, *map(int, said)] == model.alone(prompts[1], 4)
    story.run(producer)
    assert [int(chunk) for chunk in story.chunks["a"]] == model.alone(prompts[0], 4)
    assert nothing_is_left(producer)
    # One that nobody reads to its end.
    next(said := producer.alone(call))
    said.close()
    assert nothing_is_left(producer)


def test_one_that_runs_alone_has_its_slot_until_it_ends() -> None:
    model = Attention(slots=1)
    producer = producer_of(model)
    woken: list[bool] = []
    producer.on_room = lambda: woken.append(producer.waits)
    steps = torch.tensor([4])
    said = producer.alone(((torch.tensor([[3, 4]]), steps), {}))
    first = int(next(said))
    producer.add([item("a", torch.tensor([[1, 2]]), steps)])
    for _ in range(3):
        assert producer.advance(0.0) == []
        assert producer.waits and producer.live == ["a"]
    assert [first, *map(int, said)] == model.alone([3, 4], 4)
    assert woken == [False]
    story = Story().run(producer)
    assert [int(chunk) for chunk in story.chunks["a"]] == model.alone([1, 2], 4)
    assert story.ended == {"a": None}
    assert nothing_is_left(producer)


def test_memory_that_one_alone_holds_is_waited_for() -> None:
    device = Small(rows=1)
    model = Checked(device)
    producer = producer_of(model, device=device)
    said = producer.alone(((np.array([3]),), {}))
    next(said)
    device.rows = 0
    producer.add([item("a", np.array([2]))])
    assert producer.advance(0.0) == []
    assert producer.waits
    said.close()
    device.rows = 1
    assert told(Story().run(producer), "a") == [[1], [0]]
    assert nothing_is_left(producer)
