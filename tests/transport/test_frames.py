"""dumps and loads: everything arrives as it was, writable, on the CPU."""

from __future__ import annotations

import copyreg
import os
import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from daskinfer.transport import dumps, loads
from tests.payload.structures import Boxes, Frozen, ModelOutput, Pair, assert_same
from tests.transport.samples import ARRAYS, LARGE, PLAIN_DTYPES, exotic_tensors


def travel(obj: Any) -> Any:
    """Pass through bytes, as over a network that hands out read-only memory."""
    return loads([bytes(frame) for frame in dumps(obj)])


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("writeable", [True, False])
def test_arrays(name: str, writeable: bool) -> None:
    array = ARRAYS[name].view()
    if not writeable:
        array.flags.writeable = False
    arrived = travel(array)
    assert_same(arrived, array)
    assert arrived.flags.writeable
    assert arrived.flags.aligned


@pytest.mark.parametrize(
    "array",
    [
        np.ma.masked_array([1, 2], [0, 1]),
        np.zeros(2).view(np.recarray),
    ],
    ids=lambda array: type(array).__name__,
)
def test_array_subclasses_keep_their_class(array: Any) -> None:
    arrived = travel(array)
    assert type(arrived) is type(array)
    assert repr(arrived) == repr(array)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2), (LARGE,)], ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    tensor = (torch.arange(count) % 7).reshape(shape).to(dtype)
    arrived = travel(tensor)
    assert_same(arrived, tensor)
    arrived.zero_()


def test_bits_survive_where_values_do_not_compare() -> None:
    nan = torch.tensor([0x7FC1, -1, -128], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(travel(nan).view(torch.int16), nan.view(torch.int16))


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_half_precision_complex() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex32)
    arrived = travel(tensor)
    assert arrived.dtype == torch.complex32
    assert arrived.to(torch.complex64).tolist() == [1 + 2j, 3 - 1j]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.arange(20)[::3],
        torch.ones(1, 3).expand(4, 3),
        torch.arange(12.0).reshape(3, 4)[:, 1],
        torch.arange(12).reshape(3, 4).bfloat16()[:, 1],
        torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    ],
    ids=lambda tensor: f"{tensor.dtype}{tensor.stride()}",
)
def test_views_of_tensors(tensor: torch.Tensor) -> None:
    assert_same(travel(tensor), tensor)


def test_a_small_view_travels_without_what_it_views() -> None:
    view = torch.zeros(1_000_000)[:10]
    assert sum(map(len, dumps(view))) < 1000


def test_requires_grad_is_kept_also_of_results() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert travel(leaf).requires_grad
    result = travel(leaf * 2)
    assert result.requires_grad
    assert result.tolist() == [2, 2]
    assert not travel(torch.ones(2)).requires_grad


def test_inference_tensors_arrive_as_ordinary_ones() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2) * 2
    arrived = travel(tensor)
    assert not arrived.is_inference()
    assert_same(arrived, torch.full((2,), 2.0))


def test_parameters_stay_parameters() -> None:
    arrived = travel(torch.nn.Parameter(torch.ones(2).bfloat16()))
    assert type(arrived) is torch.nn.Parameter
    assert arrived.dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(exotic_tensors()))
def test_what_is_more_than_its_elements_is_left_to_torch(name: str) -> None:
    tensor = exotic_tensors()[name]
    arrived = travel(tensor)
    assert type(arrived) is type(tensor)
    assert arrived.layout == tensor.layout
    assert arrived.device == tensor.device
    assert getattr(arrived, "label", None) == getattr(tensor, "label", None)
    if not tensor.is_meta:
        assert torch.equal(arrived.to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_quantised_tensors() -> None:
    tensor = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 3, torch.qint8)
    arrived = travel(tensor)
    assert arrived.dtype == torch.qint8
    assert arrived.q_scale() == 0.5
    assert torch.equal(arrived.int_repr(), tensor.int_repr())


def test_containers_keep_what_they_are() -> None:
    tensor = torch.ones(2).bfloat16()
    tree = {
        "pair": Pair(np.ones(1), [tensor, None]),
        "boxes": Boxes(tensor, ("text", b"bytes")),
        "frozen": Frozen(tensor),
        "output": ModelOutput(logits=tensor),
        3: {1, 2},
    }
    assert_same(travel(tree), tree)


def test_one_object_twice_arrives_as_one_object() -> None:
    array, tensor = np.ones(2), torch.ones(2)
    arrived = travel([array, array, tensor, tensor])
    assert arrived[0] is arrived[1]
    assert arrived[2] is arrived[3]


def test_small_buffers_share_the_first_frame_and_large_ones_are_not_copied() -> None:
    small, large = np.ones(10), np.ones(LARGE)
    assert len(dumps([small, torch.ones(10)])) == 1
    head, first, second = dumps([small, large, torch.from_numpy(large), large])
    for frame in (first, second):
        assert np.shares_memory(np.frombuffer(frame), large)
    assert len(head) < 1000


def test_writable_frames_are_used_in_place() -> None:
    frames = dumps(np.zeros(LARGE))
    buffer = bytearray(frames[1])
    arrived = loads([frames[0], memoryview(buffer)])
    arrived[0] = 1
    assert np.frombuffer(buffer)[0] == 1


def test_frames_at_odd_addresses_give_aligned_arrays() -> None:
    frames = dumps(np.arange(LARGE))
    shifted = bytearray(1) + bytearray(frames[1])
    arrived = loads([frames[0], memoryview(shifted)[1:]])
    assert arrived.flags.aligned
    np.testing.assert_array_equal(arrived, np.arange(LARGE))


def test_lambdas_and_local_classes_travel_by_value() -> None:
    class Local:
        def __init__(self, x: Any) -> None:
            self.x = x

    function = travel(lambda x: x + 1)
    assert function(1) == 2
    arrived = travel({"it": Local(torch.ones(2).bfloat16()), "large": np.ones(LARGE)})
    assert_same(arrived["it"].x, torch.ones(2).bfloat16())
    assert arrived["large"].shape == (LARGE,)


def test_a_class_of_main_travels_by_value() -> None:
    code = """if True:
        import sys, numpy as np
        from dataclasses import dataclass
        from daskinfer.transport import dumps
        @dataclass
        class Sample:
            x: object
        frames = dumps(Sample(np.arange(3)))
        assert "torch" not in sys.modules
        sys.stdout.buffer.write(b"".join(frames))
        """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=120
    )
    assert run.returncode == 0, run.stderr.decode()
    sample = loads([run.stdout])
    assert type(sample).__name__ == "Sample"
    assert sample.x.tolist() == [0, 1, 2]


def test_modules_registered_by_value_are_carried_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tests.payload.structures as module

    cloudpickle.register_pickle_by_value(module)
    try:
        assert b"frozen" in dumps(Frozen(1))[0]
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises(TypeError, match="pickle"):
        dumps({"lock": __import__("threading").Lock()})


def test_an_objects_own_reducer_is_respected() -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    copyreg.pickle(Point, lambda point: (int, (point.x,)))
    try:
        assert travel(Point(3)) == 3
    finally:
        del copyreg.dispatch_table[Point]


def test_frames_are_plain_pickle() -> None:
    """So that a process without daskinfer's pickler can still tell what they are."""
    (frame,) = dumps({"x": np.ones(2)})
    assert_same(pickle.loads(frame), {"x": np.ones(2)})
