"""States of many requests in few trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskinfer.exceptions import OutputMismatch
from daskinfer.payload import AmbiguousOutput
from daskinfer.worker.states import States


@given(st.data())
def test_each_keeps_its_rows_whoever_comes_and_goes(data: st.DataObject) -> None:
    states, known = States(), {}
    fresh = iter(range(1000))
    for _ in range(data.draw(st.integers(1, 12))):
        act = data.draw(st.sampled_from(["put", "step", "drop"]))
        if act == "put":
            sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
            keys = {next(fresh): size for size in sizes}
            values = np.array([next(fresh) for _ in range(sum(sizes) + 2)])
            states.put(keys, {"v": values}, padding=2)
            bounds = np.cumsum([0, *sizes])
            for key, start, stop in zip(keys, bounds, bounds[1:], strict=False):
                known[key] = values[start:stop]
        elif known:
            some = data.draw(
                st.lists(st.sampled_from(sorted(known)), min_size=1, unique=True)
            )
            if act == "drop":
                states.drop(some)
                known = {key: known[key] for key in known if key not in some}
                continue
            rows = sum(len(known[key]) for key in some)
            tree = states.joined(some, pad_to=rows + 1)["v"]
            wanted = np.concatenate([known[key] for key in some])
            np.testing.assert_array_equal(tree, [*wanted, wanted[-1]])
            for key in some:
                known[key] = known[key] + 1
            states.put({k: len(known[k]) for k in some}, {"v": tree + 1}, padding=1)
        assert len(states) == len(known)
    for key, value in known.items():
        np.testing.assert_array_equal(states.joined([key])["v"], value)


def test_few_that_are_left_do_not_keep_the_memory_of_many() -> None:
    states = States()
    states.put({key: 1 for key in range(100)}, np.zeros((100, 3)))
    states.drop(range(1, 100))
    (block,) = {id(b): b for b in states._blocks.values()}.values()
    assert block.tree.shape == (1, 3) and block.tree.base is None


def test_what_was_kept_stays_where_the_new_is_wrong() -> None:
    states = States()
    states.put({"a": 1, "b": 1}, np.array([1, 2]))
    with pytest.raises(OutputMismatch, match="the state has 3 rows along axis 0 for"):
        states.put({"a": 1, "b": 1}, np.array([1, 2, 3]))
    with pytest.raises(AmbiguousOutput, match="no tree of arrays with 2 rows each"):
        states.put({"a": 1, "b": 1}, (np.array([1, 2]), np.zeros(5)))
    assert states.joined(["b", "a"]).tolist() == [2, 1]


def test_states_along_another_axis() -> None:
    states = States(axis=1)
    states.put({"a": 1, "b": 2}, np.array([[1, 2, 3]]))
    states.drop(["a"])
    assert states.joined(["b"], pad_to=3).tolist() == [[2, 3, 3]]
