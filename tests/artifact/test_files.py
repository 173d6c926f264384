"""Model files: torch.export and TorchScript, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from daskinfer.artifact import Artifact, is_module

pytestmark = [
    # torch deprecates TorchScript, which is still what many model files are.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # Of torch.export's own serializer.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

X = torch.randn(5, 4)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).eval()


def exported(net: nn.Module) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=1, max=64)
    return torch.export.export(net, (X,), dynamic_shapes=({0: rows},))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_an_export_archive(net: nn.Module, tmp_path: Path, device: str | None) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(exported(net), path)
    artifact = Artifact.from_path(path)
    path.unlink()
    model = artifact.build(device)
    assert artifact.format == "torch.export"
    assert artifact.label == "model.pt2"
    assert is_module(model)
    torch.testing.assert_close(model(X), net(X))
    torch.testing.assert_close(model(X[:1]), net(X[:1]))


def test_many_threads_read_an_export_archive(net: nn.Module, tmp_path: Path) -> None:
    """As two models do that a worker loads, or two workers in one process."""
    path = tmp_path / "model.pt2"
    torch.export.save(exported(net), path)
    artifact = Artifact.from_path(path)
    with ThreadPoolExecutor(8) as threads:
        models = list(threads.map(artifact.build, [None] * 40))
    for model in models:
        torch.testing.assert_close(model(X), net(X))


@pytest.mark.parametrize("suffix", [".ts", ".pt", ".pth"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_torchscript_file(
    net: nn.Module, tmp_path: Path, suffix: str, device: str | None
) -> None:
    path = tmp_path / f"model{suffix}"
    torch.jit.script(net.train()).save(path)
    artifact = Artifact.from_path(str(path))
    model = artifact.build(device)
    assert artifact.format == "torchscript"
    assert not model.training
    torch.testing.assert_close(model(X), net.eval()(X))


def test_the_same_file_has_the_same_digest(net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.ts"
    torch.jit.script(net).save(path)
    assert Artifact.from_path(path) == Artifact.from_path(path)


def test_programs_in_memory(net: nn.Module) -> None:
    for program in (exported(net), torch.jit.script(net), torch.jit.trace(net, X)):
        model = Artifact.from_object(program).build("cpu")
        torch.testing.assert_close(model(X), net(X))
    assert Artifact.from_object(torch.jit.script(net)).label == "Sequential"


def test_a_file_of_an_export_moves_to_its_device(net: nn.Module) -> None:
    model = Artifact.from_object(exported(net)).build("meta")
    assert {value.device.type for value in model.parameters()} == {"meta"}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("what", ["state dict", "module"])
def test_pickled_data_is_no_program(
    net: nn.Module, tmp_path: Path, what: str, legacy: bool
) -> None:
    path = tmp_path / "model.pt"
    content = net if what == "module" else net.state_dict()
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match=r"model.pt (holds|is).*load_state_dict"):
        Artifact.from_path(path)


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model file at .*missing.pt2"):
        Artifact.from_path(tmp_path / "missing.pt2")
    with pytest.raises(FileNotFoundError):
        (tmp_path / "folder.pt").mkdir()
        Artifact.from_path(tmp_path / "folder.pt")
    with pytest.raises(
        ValueError, match=r"must end in .pt2, .ts, .pt, .pth, got .*onnx"
    ):
        Artifact.from_path("model.onnx")
    np.zeros(3).tofile(tmp_path / "noise.pt2")
    with pytest.raises(ValueError, match=r"neither a torch\.export archive nor"):
        Artifact.from_path(tmp_path / "noise.pt2")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(ValueError, match="neither"):
        Artifact.from_path(tmp_path / "empty.pt")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickled_module_is_read_if_it_is_trusted(
    net: nn.Module, tmp_path: Path, legacy: bool
) -> None:
    path = tmp_path / "model.pt"
    torch.save(net, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match=r"trusted=True"):
        Artifact.from_path(path)
    artifact = Artifact.from_path(path, trusted=True)
    assert artifact.format == "module"
    assert torch.equal(artifact.build("cpu")(X), net(X))


def test_of_trusted_pickles_only_modules_are_models(
    net: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    torch.save(net.state_dict(), path)
    with pytest.raises(ValueError, match=r"holds a OrderedDict.*load_state_dict"):
        Artifact.from_path(path, trusted=True)
