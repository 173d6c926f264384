"""collate and split: a request gets what it alone would have got."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer.exceptions import OutputMismatch
from daskinfer.payload import (
    AmbiguousOutput,
    collate,
    join_outputs,
    measure,
    slice_rows,
    split,
)
from tests.payload.structures import (
    Boxes,
    Frozen,
    ModelOutput,
    Pair,
    Slotted,
    assert_same,
)

# --- round trips over nested structures -------------------------------------------

NUMPY_DTYPES = ["float32", ">f4", "float16", "int64", "uint8", "bool", "U3", "M8[s]"]
NUMPY_DTYPES += ["complex64", "object"]
TORCH_DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint16]
TORCH_DTYPES += [torch.float8_e4m3fn, torch.complex64]


def array_maker(dtype: str, shape: tuple[int, ...], axis: int, layout: str) -> Any:
    def make(rows: int, start: int) -> np.ndarray:
        full = (*shape[:axis], rows, *shape[axis:])
        values = np.arange(start, start + int(np.prod(full))).reshape(full) % 5
        array = values.astype("int64").astype(dtype)
        if layout == "negative":
            array = np.flip(np.flip(array).copy())
        elif layout == "read-only":
            array.flags.writeable = False
        elif layout == "strided":
            array = np.repeat(array, 2, axis=-1)[..., ::2]
        return array

    return make


def tensor_maker(dtype: torch.dtype, shape: tuple[int, ...], axis: int) -> Any:
    def make(rows: int, start: int) -> torch.Tensor:
        full = (*shape[:axis], rows, *shape[axis:])
        count = int(np.prod(full))
        return (torch.arange(start, start + count).reshape(full) % 5).to(dtype)

    return make


def text_maker(rows: int, start: int) -> list[str]:
    return [f"text {start + i}" for i in range(rows)]


def leaves(axis: int) -> st.SearchStrategy[Any]:
    shapes = st.tuples(*[st.integers(1, 3)] * axis).flatmap(
        lambda head: st.lists(st.integers(0, 3), max_size=2).map(
            lambda tail: (*head, *tail)
        )
    )
    layouts = st.sampled_from(["plain", "negative", "read-only", "strided"])
    return st.one_of(
        st.builds(
            array_maker, st.sampled_from(NUMPY_DTYPES), shapes, st.just(axis), layouts
        ),
        st.builds(tensor_maker, st.sampled_from(TORCH_DTYPES), shapes, st.just(axis)),
    )


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def over(build: Any) -> Any:
        return lambda makers: lambda *at: build([make(*at) for make in makers])

    def some(least: int = 1, most: int = 3) -> st.SearchStrategy[Any]:
        return st.lists(children, min_size=least, max_size=most)

    def named(values: list[Any]) -> dict[str, Any]:
        return {f"k{i}": value for i, value in enumerate(values)}

    return st.one_of(
        some().map(over(tuple)),
        some().map(over(named)),
        some().map(over(lambda values: OrderedDict(named(values)))),
        some(2, 2).map(over(lambda values: Pair(*values))),
        some(2, 2).map(over(lambda values: Boxes(*values))),
        some(1, 1).map(over(lambda values: Frozen(*values))),
        some(1, 1).map(over(lambda values: Slotted(*values))),
        some(1, 2).map(over(lambda values: ModelOutput(*values))),
    )


def trees(axis: int) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(leaves(axis), st.just(text_maker)), containers, max_leaves=5
    )


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), axis=st.sampled_from([0, 0, 1]), sizes=SIZES)
def test_collate_and_split_are_inverse(
    data: st.DataObject, axis: int, sizes: list[int]
) -> None:
    make = data.draw(trees(axis))
    keyword = data.draw(leaves(axis))
    padding = data.draw(st.integers(0, 5)) if sum(sizes) else 0
    requests = [
        ((make(size, 10 * i),), {"k": keyword(size, 10 * i), "constant": [1, "a"]})
        for i, size in enumerate(sizes)
    ]
    measures = [measure(*request, axis) for request in requests]
    assert len({m.signature for m in measures}) == 1
    assert measures[0].signature is not None
    assert [m.rows for m in measures] == sizes

    pad_to = sum(sizes) + padding
    args, kwargs = collate(requests, axis, pad_to)
    assert kwargs["constant"] is requests[0][1]["constant"]
    if padding == 0 or sum(sizes):
        assert measure(args, kwargs, axis).rows == pad_to
    outputs = split((args[0], kwargs["k"]), sizes, axis, pad_to)
    for output, (args, kwargs) in zip(outputs, requests, strict=True):
        assert_same(output, (args[0], kwargs["k"]))


@settings(deadline=None, max_examples=100)
@given(data=st.data(), count=st.integers(1, 5), padding=st.integers(0, 3))
def test_samples_are_stacked_and_unstacked(
    data: st.DataObject, count: int, padding: int
) -> None:
    make = data.draw(trees(0))
    requests = [((make(2, 10 * i),), {}) for i in range(count)]
    measures = [measure(*request, None) for request in requests]
    assert len({m.signature for m in measures}) == 1
    assert {m.rows for m in measures} == {1}

    args, _ = collate(requests, None, count + padding)
    outputs = split(args[0], [1] * count, None, count + padding)
    for output, ((sample,), _) in zip(outputs, requests, strict=True):
        assert_same(output, sample)


@settings(deadline=None, max_examples=100)
@given(
    data=st.data(),
    axis=st.sampled_from([0, 1]),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_a_large_request_is_cut_and_rejoined(
    data: st.DataObject, axis: int, sizes: list[int]
) -> None:
    request = ((data.draw(trees(axis))(sum(sizes), 0), 7), {"k": "constant"})
    outputs = []
    start = 0
    for size in sizes:
        args, kwargs = slice_rows(*request, axis, start, start + size)
        assert measure(args, kwargs, axis) == (measure(*request, axis).signature, size)
        assert (args[1], kwargs) == (7, {"k": "constant"})
        outputs.append((args[0],))
        start += size
    assert_same(join_outputs(outputs, sizes, axis), (request[0][0],))


# --- collate ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("batch_dim", [0, None])
@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_a_batch_shares_no_memory_with_its_requests(
    make: Callable[..., Any], batch_dim: int | None, count: int
) -> None:
    requests = [((make((2, 3)), make(())), {"y": make((2, 3))}) for _ in range(count)]
    args, kwargs = collate(requests, batch_dim)
    for array in (*args, kwargs["y"]):
        array *= 2
    for request_args, request_kwargs in requests:
        assert all((array == 1).all() for array in request_args)
        assert (request_kwargs["y"] == 1).all()


@pytest.mark.parametrize("batch_dim, sizes", [(0, [2]), (0, [2, 0]), (None, [1])])
@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_answers_share_no_memory_with_the_output(
    make: Callable[..., Any], batch_dim: int | None, sizes: list[int]
) -> None:
    output = make((sum(sizes), 3))
    first, *_ = split(output, sizes, batch_dim)
    output *= 2
    assert (first == 1).all()


def test_padding_repeats_the_last_row() -> None:
    requests = [((np.array([1, 2]), ["a", "b"]), {}), ((np.array([3]), ["c"]), {})]
    args, _ = collate(requests, pad_to=5)
    np.testing.assert_array_equal(args[0], [1, 2, 3, 3, 3])
    assert args[1] == ["a", "b", "c", "c", "c"]


def test_padding_skips_empty_requests_at_the_end() -> None:
    requests = [((torch.tensor([1, 2]),), {}), ((torch.tensor([], dtype=int),), {})]
    args, _ = collate(requests, pad_to=3)
    assert args[0].tolist() == [1, 2, 2]


def test_padding_of_nothing_is_zeros_and_impossible_for_lists() -> None:
    args, _ = collate([((np.ones((0, 2), "int8"),), {})], pad_to=2)
    assert_same(args[0], np.zeros((2, 2), "int8"))
    with pytest.raises(ValueError, match="0 rows cannot be padded to 2"):
        collate([(([],), {})], pad_to=2)


def test_more_rows_than_pad_to_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows cannot be padded to 2"):
        collate([((np.ones(3),), {})], pad_to=2)


def test_a_list_of_arrays_is_a_container_of_inputs() -> None:
    x, y = np.ones((1, 2)), torch.zeros(2, 3)
    requests = [(([x, {"n": 1}, torch.ones(1, 3)],), {}), (([x, {"n": 1}, y[:1]],), {})]
    ((joined,), _) = collate(requests)
    assert joined[0].shape == (2, 2)
    assert joined[1] == {"n": 1}
    assert joined[2].tolist() == [[1, 1, 1], [0, 0, 0]]


def test_the_requests_stay_as_they_were() -> None:
    shared = {"x": np.ones((1, 2)), "n": 1}
    requests = [((shared,), {}), ((shared,), {})]
    args, _ = collate(requests)
    args[0]["x"][:] = 7
    assert shared["x"].tolist() == [[1, 1]]
    assert shared == {"x": shared["x"], "n": 1}


def test_odd_mappings_are_rebuilt_as_what_they_are() -> None:
    class Encoding(UserDict):  # type: ignore[type-arg]
        pass

    for cls in (lambda d: defaultdict(list, d), Encoding):
        args, _ = collate([((cls({"x": np.ones(1)}),), {})] * 2)
        assert type(args[0]) is type(cls({}))
        assert args[0]["x"].shape == (2,)
    args, _ = collate([((defaultdict(list, x=np.ones(1)),), {})])
    assert args[0]["new"] == []


# --- split ----------------------------------------------------------------------------


def test_pieces_own_their_memory() -> None:
    batch = np.arange(12.0).reshape(6, 2)
    one, _ = split({"y": batch}, [2, 4])
    assert one["y"].base is None
    batch[:] = -1
    assert one["y"].tolist() == [[0, 1], [2, 3]]
    tensors = torch.arange(6)
    first, _ = split(tensors, [1, 5])
    assert first.untyped_storage().nbytes() == first.nbytes
    tensors[:] = -1
    assert first.tolist() == [0]


@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_a_view_does_not_keep_what_it_views(sizes: list[int]) -> None:
    hidden = torch.zeros(2, 100, 3)
    for output in split(hidden[:, 0], sizes):
        assert output.untyped_storage().nbytes() == output.nbytes
    for output in split(hidden[:, 0].numpy(), sizes):
        assert output.base is None
    for output in split(list(hidden.numpy()), sizes):
        assert all(row.base is None for row in output)


@pytest.mark.parametrize("sizes", [[4], [1, 3]])
def test_no_piece_is_an_inference_tensor(sizes: list[int]) -> None:
    with torch.inference_mode():
        output = torch.ones(4, 2) * 2
    for piece in split(output, sizes):
        assert not piece.is_inference()
        (piece * torch.ones(1, requires_grad=True)).sum().backward()


def test_none_is_everybodys_answer() -> None:
    outputs = split({"y": np.ones(2), "aux": None}, [1, 1])
    assert [output["aux"] for output in outputs] == [None, None]
    assert split(None, [1, 2]) == [None, None]


def test_zero_rows_get_an_empty_answer() -> None:
    empty, full = split({"y": np.ones((2, 3))}, [0, 2])
    assert empty["y"].shape == (0, 3)
    assert full["y"].shape == (2, 3)


def test_sorting_results_of_torch_keep_their_type() -> None:
    output = torch.max(torch.arange(6.0).reshape(3, 2), dim=1)
    one, two = split(output, [1, 2])
    assert type(one) is type(output)
    assert two.values.tolist() == [3, 5]
    assert two.indices.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("output", "sizes", "message"),
    [
        (
            np.ones((4, 2)),
            [1, 2],
            r"output has shape \(4, 2\), .* 4 rows .* batch of 3",
        ),
        (torch.ones(2), [1, 2], r"\(2,\), .*without a batch axis need .*=None\)$"),
        (np.float32(1.0), [1], r"output is float32 .*no batch axis"),
        (np.array(1.0), [1], r"output has shape \(\), so it has no axis 0"),
        ({"a": (None, {"b": 1.5})}, [1, 1], r"output\['a'\]\[1\]\['b'\] is float 1.5"),
        ({"logits": (None, np.ones(5))}, [2], r"output\['logits'\]\[1\] has shape"),
        (Boxes(np.ones(2), "text"), [1, 1], r"output.scores is str 'text'"),
        (["a"], [1, 1], "output is a list of 1 entry for a batch of 2 "),
        (["a", "b", "c"], [1, 1], "output is a list of 3 entries"),
        ([], [1], "output is a list of 0 entries"),
        ([np.ones(3), np.ones(3)], [1, 2, 4], "output is a list of 2 entries"),
        (torch.eye(2).to_sparse(), [1, 1], "sparse"),
        (object(), [1], "no batch axis"),
    ],
)
def test_an_output_without_the_batch_axis_is_named(
    output: Any, sizes: list[int], message: str
) -> None:
    with pytest.raises(OutputMismatch, match=message):
        split(output, sizes)


def test_many_sizes_make_no_endless_message() -> None:
    with pytest.raises(OutputMismatch) as caught:
        split(np.ones(3), [1] * 10_000)
    assert len(str(caught.value)) < 300


def test_wrong_counts_of_samples_are_named() -> None:
    with pytest.raises(OutputMismatch, match="list of 3 entries for a batch of 2"):
        split(["a", "b", "c"], [1, 1], None)
    with pytest.raises(OutputMismatch, match=r"shape \(3, 2\)"):
        split(np.ones((3, 2)), [1, 1], None)


def test_lists_of_arrays_are_read_by_what_fits() -> None:
    levels = [np.ones((3, 8)), np.ones((3, 4))]  # two outputs with the batch axis
    one, two = split(levels, [1, 2])
    assert [level.shape for level in one] == [(1, 8), (1, 4)]
    assert [level.shape for level in two] == [(2, 8), (2, 4)]

    detections = [{"boxes": np.ones((k, 4))} for k in (5, 0, 2)]  # one entry per row
    one, two = split(detections, [1, 2])
    assert [d["boxes"].shape for d in one] == [(5, 4)]
    assert [d["boxes"].shape for d in two] == [(0, 4), (2, 4)]


def test_a_list_that_can_be_read_both_ways_is_no_guess() -> None:
    both = [np.ones((2, 4)), np.zeros((2, 4))]
    with pytest.raises(AmbiguousOutput, match="tuple"):
        split(both, [1, 1])
    # Alone in its batch a request gets everything, however one reads it.
    assert_same(split(both, [2])[0], both)


def test_samples_get_their_entry_of_a_list() -> None:
    assert split([np.ones((1, 2))], [1], None)[0].shape == (1, 2)
    assert split([["a", "b"], ["c"]], [1, 1], None) == [["a", "b"], ["c"]]


def test_passes_of_different_structure_are_not_joined() -> None:
    with pytest.raises(OutputMismatch, match="ndarray, tuple"):
        join_outputs([np.ones(1), (np.ones(1),)], [1, 1])
    with pytest.raises(OutputMismatch, match=r"output\['y'\] has shape \(1,\)"):
        join_outputs([{"y": np.ones(1)}, {"y": np.ones(1)}], [1, 2])


def test_lists_of_arrays_are_joined_by_what_fits_every_pass() -> None:
    per_row = [[np.ones((2, 4)), np.ones((2, 4))], [np.ones((3, 4))]]
    assert len(join_outputs(per_row, [2, 1])) == 3
    levels = [[np.ones((2, 4)), np.ones((2, 8))], [np.ones((1, 4)), np.ones((1, 8))]]
    assert [level.shape for level in join_outputs(levels, [2, 1])] == [(3, 4), (3, 8)]


@pytest.mark.parametrize(
    ("sizes", "pad_to", "told"),
    [
        ([1], 2, "a batch of 2 (a request of 1 row, padded)"),
        ([2], None, "a batch of 2 (a request of 2 rows)"),
        ([1, 2], None, "a batch of 3 (requests of 1, 2 rows)"),
        ([1] * 9, None, "a batch of 9 (requests of 1, 1, 1, 1, 1, 1, 1, 1, ... rows)"),
    ],
)
def test_the_batch_is_told_in_words(
    sizes: list[int], pad_to: int | None, told: str
) -> None:
    with pytest.raises(OutputMismatch) as caught:
        split(["a"] * 11, sizes, pad_to=pad_to)
    assert told in str(caught.value)
