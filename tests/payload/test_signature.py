"""measure: who may share a pass with whom, and how many rows one brings."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.payload import Measure, measure
from tests.payload.structures import Boxes, ModelOutput, Pair


def signature(*args: Any, batch_dim: int | None = 0, **kwargs: Any) -> str | None:
    return measure(args, kwargs, batch_dim).signature


def rows(*args: Any, batch_dim: int | None = 0, **kwargs: Any) -> int:
    return measure(args, kwargs, batch_dim).rows


ONE = np.ones((1, 3), "float32")
TWO = np.zeros((2, 3), "float32")


def test_requests_of_different_size_share_a_signature() -> None:
    assert signature(ONE) == signature(TWO)
    assert (rows(ONE), rows(TWO)) == (1, 2)


@pytest.mark.parametrize(
    "other",
    [
        np.ones((1, 4), "float32"),
        np.ones((1, 3, 1), "float32"),
        np.ones((1, 3), "float64"),
        np.ones((1, 3), ">f4"),
        np.ones((1, 3), "int32"),
        np.ones((1, 3), bool),
        torch.ones(1, 3),
        [ONE],
        (ONE,),
        {"x": ONE},
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_another_shape_dtype_kind_or_container_never_shares(other: Any) -> None:
    assert signature(other) is not None
    assert signature(other) != signature(ONE)


def test_structured_dtypes_are_told_apart_by_their_fields() -> None:
    ab = np.zeros(2, [("a", "f4"), ("b", "i4")])
    ba = np.zeros(2, [("b", "f4"), ("a", "i4")])
    assert signature(ab) != signature(ba)


def test_position_and_keyword_differ() -> None:
    assert signature(ONE) != signature(x=ONE)
    assert signature(ONE, ONE) != signature(ONE)


def test_the_order_of_keywords_does_not_matter() -> None:
    assert signature(a=ONE, b=1) == signature(b=1, a=TWO)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        (None, "None"),
        ("a", b"a"),
        ([1, 2], [1, 3]),
        ({"k": [1]}, {"k": [2]}),
        ((1, (2,)), ((1, 2),)),
        (np.float32(1), np.float64(1)),
        (np.array(1), np.array(2)),
        (np.array(1), torch.tensor(1)),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16)),
        (slice(0, 2), slice(0, 3)),
        (partial(int, base=2), partial(int, base=8)),
        (frozenset({1}), frozenset({2})),
    ],
)
def test_constants_count_by_kind_and_value(one: Any, other: Any) -> None:
    assert signature(ONE, k=one) != signature(ONE, k=other)
    assert signature(ONE, k=one) == signature(TWO, k=pickle.loads(pickle.dumps(one)))


@pytest.mark.parametrize("value", [1, 2.5, "text", None, np.array(3), torch.tensor(3)])
def test_positional_scalars_are_constants_along_an_axis(value: Any) -> None:
    assert rows(TWO, value) == 2
    assert signature(TWO, value) != signature(TWO, "something else")


def test_a_constant_object_counts_with_all_its_state() -> None:
    one, other = Boxes(1, 2), Boxes(1, 2)
    assert signature(ONE, config=one) == signature(ONE, config=other)
    other.threshold = 0.5  # type: ignore[attr-defined]
    assert signature(ONE, config=one) != signature(ONE, config=other)


def test_a_lambda_is_compared_by_what_it_does() -> None:
    assert signature(ONE, k=lambda x: x + 1) != signature(ONE, k=lambda x: x + 2)


def test_long_signatures_are_digests() -> None:
    large = signature(ONE, prompt="x" * 10_000)
    assert large is not None
    assert len(large) < 64
    assert large != signature(ONE, prompt="x" * 10_001)
    assert large == signature(TWO, prompt="x" * 10_000)


def test_lists_carry_one_row_per_element() -> None:
    assert measure((["a", "b", "c"],), {}).rows == 3
    assert measure(({"text": ["a", "b"], "lang": "en"},), {}).rows == 2
    assert signature(["a"]) == signature(["b", "c"])
    assert signature({"text": ["a"], "lang": "en"}) != signature(
        {"text": ["a"], "lang": "de"}
    )


def test_a_list_keyword_is_a_constant_unless_it_holds_arrays() -> None:
    assert signature(ONE, stop=["a"]) != signature(ONE, stop=["b"])
    assert signature(ONE, masks=[ONE]) == signature(TWO, masks=[TWO])


def test_containers_are_looked_into() -> None:
    for wrap in (
        lambda x: Pair(x, [x, x]),
        lambda x: Boxes(x, (x,)),
        lambda x: ModelOutput(logits=x),
        lambda x: OrderedDict(a=x),
        lambda x: {"deep": [{"er": (x,)}]},
    ):
        assert rows(wrap(TWO)) == 2
        assert signature(wrap(ONE)) == signature(wrap(TWO))
    assert signature(Pair(ONE, ONE)) != signature((ONE, ONE))
    assert signature(OrderedDict(a=ONE)) != signature({"a": ONE})


@pytest.mark.parametrize(
    "request_",
    [
        ((ONE, TWO), {}),
        ((ONE,), {"mask": TWO}),
        ((ONE, ["a", "b"]), {}),
        ((), {}),
        ((), {"k": 1}),
        ((3, "text", None), {}),
        (((1, 2),), {}),
        ((np.array(1.0),), {}),
        ((np.ma.masked_array([1, 2], [0, 1]),), {}),
        ((torch.eye(3).to_sparse(),), {}),
    ],
)
def test_what_cannot_be_batched_runs_alone(request_: Any) -> None:
    assert measure(*request_) == Measure(None, 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_a_nested_tensor_runs_alone() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert measure((nested,), {}) == Measure(None, 1)


def test_a_tensor_subclass_runs_alone_and_a_parameter_is_a_tensor() -> None:
    class Image(torch.Tensor):
        pass

    assert signature(torch.ones(1, 3).as_subclass(Image)) is None
    parameter = torch.nn.Parameter(torch.ones(1, 3))
    assert signature(parameter) == signature(torch.ones(2, 3))


def test_zero_rows_are_rows() -> None:
    assert measure((ONE[:0],), {}) == Measure(signature(ONE), 0)
    assert measure(([],), {}).rows == 0


def test_another_axis() -> None:
    sequence = np.ones((7, 2, 3))
    assert rows(sequence, batch_dim=1) == 2
    assert signature(sequence, batch_dim=1) == signature(sequence[:, :1], batch_dim=1)
    assert signature(sequence, batch_dim=1) != signature(sequence[:6], batch_dim=1)
    assert signature(np.ones(7), batch_dim=1) is None


def test_samples_are_one_row_each() -> None:
    sample = partial(measure, kwargs={}, batch_dim=None)
    assert sample((np.ones((3, 4)),)).rows == 1
    assert sample((np.array(3),)).rows == 1
    assert sample(("a text",)).signature == sample(("another",)).signature
    assert sample(({"text": "a"},)).signature == sample(({"text": "b"},)).signature
    assert sample((["a", "b"],)) == (sample((["c"],)).signature, 1)
    assert sample((np.ones(3),)).signature != sample((np.ones(4),)).signature
    assert sample((None,)).signature is None


def test_keywords_of_samples_are_constants_unless_arrays() -> None:
    one = signature("a", top_k=1, batch_dim=None)
    assert one == signature("b", top_k=1, batch_dim=None)
    assert one != signature("a", top_k=2, batch_dim=None)
    assert signature(x=np.ones(3), batch_dim=None) == signature(
        x=np.zeros(3), batch_dim=None
    )


def test_the_inputs_own_exception_comes_through() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            raise RuntimeError("cannot be sized")

    with pytest.raises(RuntimeError, match="cannot be sized"):
        measure((ONE,), {"k": Broken()})


def test_nothing_is_changed() -> None:
    args = ({"a": [ONE, ONE]}, ["text"])
    measure(args, {"k": (1, 2)})
    assert args[0]["a"][0] is ONE
    assert args == ({"a": [ONE, ONE]}, ["text"])


def test_signatures_are_the_same_in_another_process() -> None:
    code = """if True:
        import numpy as np, torch
        from daskinfer.payload import measure
        x = np.ones((2, 3), "float32")
        print(measure((x, {"t": torch.ones(2, 5).bfloat16()}), {"k": ("a", 1.5)}))
        print(measure((x,), {"prompt": "y" * 500, "window": slice(1, 2)}))
        """
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert "signature='" in outputs[0]
