"""Modules, callables and factories: taken apart here, the same elsewhere."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

from daskinfer.artifact import Artifact, DamagedArtifact, is_module
from tests.artifact.models import (
    Locked,
    Pipeline,
    Tied,
    WithExtraState,
    build_linear,
)


def rebuild(model: Any, device: str | None = None) -> Any:
    """Take apart, pass through bytes as over a network, and build."""
    artifact = Artifact.from_object(model)
    return arrived(artifact).build(device)


def arrived(artifact: Artifact) -> Artifact:
    return Artifact(
        artifact.format,
        bytes(artifact.builder),
        None if artifact.weights is None else memoryview(bytes(artifact.weights)),
        artifact.label,
        artifact.digest,
    )


def test_a_module_answers_the_same() -> None:
    net = Tied().eval()
    x = torch.randn(3, 4)
    for device in (None, "cpu", torch.device("cpu")):
        assert torch.equal(rebuild(net, device)(x), net(x))


def test_shared_memory_stays_shared() -> None:
    net = rebuild(Tied())
    assert net.decoder.weight is net.encoder.weight
    with torch.no_grad():
        net.encoder.weight[0, 0] = 7
    assert net.first_row[0] == 7


def test_all_kinds_of_state_arrive() -> None:
    net = rebuild(Tied())
    assert net.lost.tolist() == [3, 3, 3, 3]
    assert "lost" not in net.state_dict()
    assert net.empty.shape == (0, 3)
    assert net.plain.dtype == torch.bfloat16
    assert net.table.flags.writeable
    state = WithExtraState()
    state.scale = 5
    x = torch.ones(1, 2)
    again = rebuild(state)
    assert again.scale == 5
    assert torch.equal(again(x), state(x))


def test_batch_norm_and_dropout_arrive_in_evaluation_mode() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    x = torch.randn(8, 4)
    net(x)
    again = rebuild(net)
    assert not any(part.training for part in again.modules())
    assert all(part.training for part in net.modules())
    assert torch.equal(again(x), copy.deepcopy(net).eval()(x))


def test_the_callers_module_is_not_touched() -> None:
    net = WithExtraState().train()
    before = {name: value.clone() for name, value in net.named_parameters()}
    memory = [value.data_ptr() for value in net.parameters()]
    again = rebuild(net)
    again.layer.weight.data.zero_()
    assert net.training
    assert len(net.layer._forward_hooks) == 1
    assert [value.data_ptr() for value in net.parameters()] == memory
    for name, value in net.named_parameters():
        assert torch.equal(value, before[name])


def test_two_built_from_one_artifact_are_independent() -> None:
    artifact = Artifact.from_object(build_linear(3))
    one, other = artifact.build(), artifact.build("cpu")
    with torch.no_grad():
        one.weight.zero_()
    assert torch.equal(other.weight, torch.eye(3))
    artifact.build()  # and the parts are still what they were


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao is deprecated
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_dynamically_quantised_modules() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(net, {nn.Linear})
    x = torch.randn(3, 64)
    assert torch.equal(rebuild(quantised, "cpu")(x), quantised(x))
    with pytest.raises(ValueError, match=r"quantised layers \(0, 2\).*device='cpu'"):
        rebuild(quantised, "meta")


def test_a_module_moves_to_its_device() -> None:
    net = rebuild(nn.Linear(2, 2), "meta")
    assert {value.device.type for value in net.parameters()} == {"meta"}


def test_a_model_of_main_travels_by_value(tmp_path: Path) -> None:
    code = f"""if True:
        import pickle, torch
        from daskinfer.artifact import Artifact
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 2)
                self.activation = lambda x: x * 3
            def forward(self, x):
                return self.activation(self.layer(x))
        net = Net()
        a = Artifact.from_object(net)
        parts = (a.format, a.builder, bytes(a.weights), a.label, a.digest)
        x = torch.ones(1, 2)
        with open({str(tmp_path / "parts")!r}, "wb") as file:
            pickle.dump((parts, net(x).tolist()), file)
        """
    run(code)
    with open(tmp_path / "parts", "rb") as file:
        (format, builder, weights, label, digest), wanted = cloudpickle.load(file)
    assert label == "Net"
    net = Artifact(format, builder, memoryview(weights), label, digest).build()
    assert net(torch.ones(1, 2)).tolist() == wanted


def test_callables_travel_as_they_are() -> None:
    pipeline = Pipeline()
    batch = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    again = rebuild(pipeline, "cpu")
    np.testing.assert_array_equal(again(batch), pipeline(batch))
    assert not is_module(again)

    offset = 3
    assert rebuild(lambda batch: batch + offset)(1) == 4
    assert rebuild(np.tanh) is np.tanh


def test_a_module_inside_a_callable_is_left_alone() -> None:
    pipeline = Pipeline()
    assert rebuild(pipeline, "cpu").net.training


def test_a_factory_is_called_where_the_model_is_built() -> None:
    artifact = Artifact.from_factory(
        "tests.artifact.models:build_linear",
        {"size": 20_000 // 100, "bias": np.ones(200, "float32")},
    )
    net = arrived(artifact).build("cpu")
    assert not net.training
    assert torch.equal(net(torch.ones(1, 200)), torch.full((1, 200), 2.0))
    nested = Artifact.from_factory(
        "tests.artifact.models:Namespace.build", {"size": 2}
    ).build()
    assert is_module(nested)


def test_what_the_factory_raises_comes_through() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        Artifact.from_factory("no_such_module:build").build()
    with pytest.raises(AttributeError, match="no_such_function"):
        Artifact.from_factory("tests.artifact.models:no_such_function").build()
    with pytest.raises(TypeError, match="missing 1 required"):
        Artifact.from_factory("tests.artifact.models:build_linear").build()
    with pytest.raises(TypeError, match="returned a int, which cannot be called"):
        Artifact.from_factory("tests.artifact.models:build_number").build()


@pytest.mark.parametrize(
    "factory", ["", "module", "module:", ":name", "a b:c", "a:b:c"]
)
def test_a_malformed_factory_is_refused(factory: str) -> None:
    with pytest.raises(ValueError, match="factory must look like"):
        Artifact.from_factory(factory)


def test_a_factory_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="factory must be a string"):
        Artifact.from_factory(build_linear)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear, "class Linear itself; pass an instance or factory="),
        (type("Net", (), {"__module__": "__main__"}), "pass an instance$"),
        ("net.pt2", "a str, which cannot be called; .* or path= for a text"),
        (3, "a int, which cannot be called"),
        ({"weight": torch.ones(1)}, "a dict, which cannot be called"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Artifact.from_object(model)


def test_an_unpicklable_part_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        Artifact.from_object(Locked())
    message = str(caught.value)
    assert "cannot deploy Locked: its part .encoder.1.caches['main'][1] (a lock)" in (
        message
    )
    assert "factory=" in message
    with pytest.raises(TypeError, match=r"\['lock'\]"):
        Artifact.from_factory("a:b", {"lock": __import__("threading").Lock()})


def test_a_damaged_artifact_is_not_built() -> None:
    artifact = Artifact.from_object(Tied())
    assert artifact.weights is not None
    artifact.weights[-100] ^= 1
    with pytest.raises(DamagedArtifact, match="Tied arrived damaged"):
        artifact.build()


def test_equal_models_have_equal_digests_and_others_not() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    one = Artifact.from_object(net)
    assert Artifact.from_object(net) == one
    assert hash(Artifact.from_object(net)) == hash(one)
    with torch.no_grad():
        net.weight[0, 0] += 1
    assert Artifact.from_object(net) != one
    assert Artifact.from_object(nn.Linear(3, 3, bias=False)) != one
    factory = "tests.artifact.models:build_linear"
    assert Artifact.from_factory(factory, {"size": 2}) == Artifact.from_factory(
        factory, {"size": 2}
    )
    assert Artifact.from_factory(factory, {"size": 2}) != Artifact.from_factory(
        factory, {"size": 3}
    )


def test_digests_of_importable_models_agree_between_processes() -> None:
    code = """if True:
        import torch
        from daskinfer.artifact import Artifact
        from tests.artifact.models import Tied
        torch.manual_seed(0)
        print(Artifact.from_object(Tied()).digest)
        """
    assert run(code, PYTHONHASHSEED="1") == run(code, PYTHONHASHSEED="2")


def test_the_weights_are_a_safetensors_blob() -> None:
    artifact = Artifact.from_object(build_linear(3))
    assert artifact.weights is not None
    tensors = safetensors.numpy.load(bytes(artifact.weights))
    np.testing.assert_array_equal(
        tensors["0"][: 9 * 4].view("float32"), np.eye(3).ravel()
    )


def test_tied_weights_and_views_travel_once() -> None:
    big = nn.Linear(512, 512, bias=False)
    twice = nn.Sequential(big, big, nn.Linear(512, 512, bias=False))
    twice[2].weight = big.weight
    once = Artifact.from_object(big).nbytes
    assert Artifact.from_object(twice).nbytes < 1.1 * once


def test_a_model_without_weights_has_none() -> None:
    assert Artifact.from_object(nn.ReLU()).weights is None
    assert rebuild(nn.ReLU())(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]


def test_nothing_is_imported_before_it_is_needed() -> None:
    run(
        "import sys; import daskinfer.artifact as a\n"
        "a.Artifact.from_object(len).build(); a.Artifact.from_factory('m:f')\n"
        "assert 'torch' not in sys.modules"
    )


MEMORY = """if True:
    import resource, torch
    from daskinfer.artifact import Artifact

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)])
    weights = sum(p.nbytes for p in net.parameters())
    Artifact.from_object(torch.nn.Linear(8, 8)).build("cpu")
    start = peak()
    artifact = Artifact.from_object(net)
    made = peak()
    model = artifact.build("cpu")
    print((made - start) / weights, (peak() - made) / weights)
    """


def test_weights_are_copied_once_on_each_side() -> None:
    making, building = map(float, run(MEMORY).split())
    assert making < 1.2
    assert building < 1.2


def run(code: str, **environ: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
