"""A batch through a model: who fails, who is answered, and in how many passes."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.exceptions import OutputMismatch
from daskinfer.worker.execution import BatchRun, Item, Outcome, PassSizes


class NoMemory(RuntimeError):
    pass


class Device:
    """Has memory for so many rows."""

    def __init__(self, rows: int = 1 << 30) -> None:
        self.rows = rows
        self.emptied = 0

    def is_out_of_memory(self, exc: BaseException) -> bool:
        return isinstance(exc, NoMemory)

    def is_fatal(self, exc: BaseException) -> bool:
        return "507" in str(exc)

    def empty_cache(self) -> None:
        self.emptied += 1


class Doubles:
    """Doubles its rows; raises where it meets a negative one."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = device
        self.sizes: list[int] = []

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.sizes.append(len(x))
        if self.device is not None and len(x) > self.device.rows:
            raise NoMemory(f"no memory for {len(x)} rows")
        if (x < 0).any():
            raise ValueError(f"negative: {x[x < 0][0]:g}")
        return 2 * x


def items(values: list[float], rows: int = 1) -> list[Item]:
    return [
        Item(f"r{i}", lambda v=v: ((np.full((rows, 1), float(v)),), {}))
        for i, v in enumerate(values)
    ]


def run(model, requests, device=None, probe=None, **sizes) -> Outcome:
    passes = PassSizes(**{"rows": 64, **sizes})
    return BatchRun(model, 0, passes, device=device, probe=probe)(requests)


def test_one_bad_input_fails_alone():
    model = Doubles()
    outcome = run(model, items([*range(31), -7, *range(32, 64)]))
    assert list(outcome.errors) == ["r31"]
    assert str(outcome.errors["r31"]) == "negative: -7"
    assert {k: v.item() for k, v in outcome.results.items()} == {
        f"r{i}": 2.0 * i for i in range(64) if i != 31
    }
    assert len(model.sizes) <= 1 + 2 * math.log2(64)


@given(st.sets(st.integers(0, 63), max_size=6))
def test_bad_inputs_cost_few_passes(bad: set[int]):
    model = Doubles()
    outcome = run(model, items([-i - 1.0 if i in bad else i for i in range(64)]))
    assert set(outcome.errors) == {f"r{i}" for i in bad}
    assert len(outcome.results) == 64 - len(bad)
    assert len(model.sizes) <= 1 + 2 * len(bad) * math.log2(64)
    assert all(str(outcome.errors[f"r{i}"]) == f"negative: {-i - 1}" for i in bad)


def test_an_error_is_of_the_pass_in_which_its_input_was_alone():
    outcome = run(Doubles(), items([1.0, -2.0, 3.0, -4.0, 5.0, 6.0, 7.0, 8.0]))
    assert list(outcome.errors) == ["r1", "r3"]
    for error in outcome.errors.values():
        # Neither what larger passes raised, nor what is wrong with others.
        assert error.__context__ is None and error.__cause__ is None
    assert str(outcome.errors["r3"]) == "negative: -4"


def test_inputs_that_fail_only_together_are_all_answered():
    class Quarrels(Doubles):
        def __call__(self, x: np.ndarray) -> np.ndarray:
            if 3 in x and 12 in x:
                raise ValueError("3 meets 12")
            return super().__call__(x)

    outcome = run(Quarrels(), items(list(range(16))))
    assert not outcome.errors
    assert outcome.results["r12"].item() == 24


def test_a_model_that_gives_back_too_little_is_asked_once():
    calls = []

    def loses_a_row(x: np.ndarray) -> np.ndarray:
        calls.append(len(x))
        return x[1:]

    outcome = run(loses_a_row, items([1, 2, 3]))
    assert calls == [3]
    assert all(isinstance(e, OutputMismatch) for e in outcome.errors.values())
    assert len(outcome.errors) == 3


def test_a_device_that_is_gone_is_asked_once():
    calls = []

    def dies(x: np.ndarray) -> np.ndarray:
        calls.append(len(x))
        raise RuntimeError("error code is 507018")

    outcome = run(dies, items([1, 2, 3]), Device())
    assert calls == [3]
    assert len(outcome.struck) == 3 and not outcome.errors


@pytest.mark.parametrize("fits", [1, 5, 40, 63])
def test_what_does_not_fit_is_run_in_smaller_passes(fits: int):
    device = Device(fits)
    model = Doubles(device)
    outcome = run(model, items(list(range(64))), device)
    assert not outcome.errors
    assert [outcome.results[f"r{i}"].item() for i in range(64)] == [
        2.0 * i for i in range(64)
    ]
    failed = [size for size in model.sizes if size > fits]
    assert len(failed) == device.emptied <= math.log2(64)
    assert outcome.out_of_memory == min(failed)


def test_a_large_request_is_cut_until_it_fits():
    device = Device(5)
    outcome = run(Doubles(device), items([3], rows=100), device)
    assert outcome.results["r0"].tolist() == [[6.0]] * 100
    assert {p["rows"] for p in outcome.passes} == {4}


def test_allowed_sizes_are_kept_when_memory_is_short():
    device = Device(4)
    model = Doubles(device)
    outcome = run(model, items(list(range(9))), device, rows=16, allowed=(1, 4, 16))
    assert not outcome.errors
    assert set(model.sizes) <= {1, 4, 16}
    assert outcome.out_of_memory == 16


def test_what_never_fits_fails_with_the_devices_error():
    device = Device(0)
    model = Doubles(device)
    outcome = run(model, items([1, 2]), device)
    assert {type(error) for error in outcome.errors.values()} == {NoMemory}
    assert outcome.out_of_memory == 0
    # The smallest passes have a second chance with the emptied cache.
    assert model.sizes == [2, 1, 1, 1, 1]
    assert outcome.broken is None


@pytest.mark.parametrize(("fits", "learned"), [(64, 0), (5, 8)])
def test_a_request_that_never_fits_says_nothing_of_the_sizes_that_do(fits, learned):
    device = Device(fits)
    model = Doubles(device)

    def with_a_giant(x: np.ndarray) -> np.ndarray:
        if (x == 40).any():
            raise NoMemory("for the giant")
        return model(x)

    outcome = run(with_a_giant, items(list(range(64))), device)
    assert list(outcome.errors) == ["r40"] and len(outcome.results) == 63
    assert outcome.out_of_memory == learned


def test_memory_that_is_lost_is_told_from_an_input_that_is_too_large():
    device = Device(0)
    calls: list[int] = []

    def fits() -> None:
        calls.append(1)

    def fits_not() -> None:
        calls.append(1)
        raise NoMemory("not even the usual")

    outcome = run(Doubles(device), items([1, 2]), device, probe=fits)
    assert sorted(outcome.errors) == ["r0", "r1"]
    assert outcome.broken is None and len(calls) == 2

    outcome = run(Doubles(device), items([1, 2]), device, probe=fits_not)
    assert isinstance(outcome.broken, NoMemory)
    assert outcome.struck == ["r0"]
    assert not outcome.errors and not outcome.results
    assert len(calls) == 3


def test_what_a_failed_pass_computed_is_let_go_before_the_next():
    class Tensor:
        pass

    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def hungry(x: np.ndarray) -> np.ndarray:
        alive.append(sum(ref() is not None for ref in kept))
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        if len(x) > 1:
            raise NoMemory
        return x

    outcome = run(hungry, items([1, 2, 3, 4]), Device())
    assert len(outcome.results) == 4
    assert alive == [0] * len(alive)


def test_nothing_runs_after_the_device_has_failed():
    model = Doubles()

    def fails_on_three(x: np.ndarray) -> np.ndarray:
        if (x == 3).any():
            raise RuntimeError("error code is 507015")
        return model(x)

    outcome = run(fails_on_three, items(list(range(8))), Device(), rows=2)
    assert sorted(outcome.results) == ["r0", "r1"]
    assert outcome.struck == ["r2", "r3"]
    assert "507015" in str(outcome.broken)
    assert not outcome.errors
    assert model.sizes == [2]


def test_memory_and_a_bad_input_at_once():
    device = Device(8)
    outcome = run(Doubles(device), items([*range(20), -1, *range(20)]), device)
    assert list(outcome.errors) == ["r20"]
    assert len(outcome.results) == 40
