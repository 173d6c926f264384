"""What pyproject.toml, constraints.txt and the scripts say agree with each other."""

from __future__ import annotations

import re
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pinned
    }


def requirements(project: dict[str, Any], *, without: str) -> list[Requirement]:
    lines = list(project["dependencies"])
    for extra, names in project["optional-dependencies"].items():
        if extra != without:
            lines += names
    return [Requirement(line) for line in lines if not line.startswith("daskinfer[")]


def test_every_development_requirement_is_pinned_to_a_release_it_admits(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    for requirement in requirements(project, without="npu"):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pins[name]), (requirement, pins[name])


def test_torch_is_pinned_without_a_local_version(pins: dict[str, str]) -> None:
    assert "+" not in pins["torch"]


def test_only_the_npu_extra_brings_torch_npu(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    names = {
        canonicalize_name(requirement.name)
        for requirement in requirements(project, without="npu")
    }
    assert "torch-npu" not in names
    assert "torch-npu" not in pins
    assert project["optional-dependencies"]["npu"] == ["torch-npu==2.13.*"]


def test_dask_and_distributed_have_the_same_lower_bound(
    project: dict[str, Any],
) -> None:
    bounds = {
        requirement.name: str(requirement.specifier)
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name in {"dask", "distributed"}
    }
    assert bounds["dask"] == bounds["distributed"]
    # The form that .ci/oldest reads.
    assert re.fullmatch(r">=\d{4}\.\d+\.\d+", bounds["distributed"])


def test_this_python_is_admitted(project: dict[str, Any]) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    assert SpecifierSet(project["requires-python"]).contains(version)


def test_the_same_pythons_as_dasks_own(project: dict[str, Any]) -> None:
    assert project["requires-python"] == metadata("dask")["Requires-Python"]


def test_changelog_has_an_entry_for_this_version(project: dict[str, Any]) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## {re.escape(project['version'])}\b", changelog, re.M)
