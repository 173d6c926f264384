"""The systemd units, as far as they can be checked without running them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from distributed.cli.dask_scheduler import main as dask_scheduler

from daskinfer.cli.worker import worker
from tests.tools import require_tool

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))


def verify(unit: Path, folder: Path, old: str = "", new: str = "") -> str:
    """Have a unit verified as it would be where the project is installed."""
    text = unit.read_text().replace("/opt/daskinfer/bin/dask", "/bin/true")
    text = re.sub("^User=.*", "User=root", text, flags=re.MULTILINE)
    assert old in text
    copy = folder / unit.name
    copy.write_text(text.replace(old, new))
    checked = subprocess.run(
        [require_tool("systemd-analyze"), "verify", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return checked.stdout + checked.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing(unit, tmp_path):
    assert verify(unit, tmp_path) == ""


def test_systemd_would_find_something(tmp_path):
    assert "Restrat" in verify(UNITS[0], tmp_path, "Restart=", "Restrat=")


@pytest.mark.parametrize(
    ("name", "command", "role"),
    [
        ("daskinfer-scheduler", dask_scheduler, ["scheduler"]),
        ("daskinfer-workers", worker, ["infer", "worker"]),
    ],
)
def test_the_options_are_those_of_the_command(name, command, role):
    unit = (FOLDER / f"{name}.service").read_text()
    [line] = re.findall("^ExecStart=(.*)", unit, flags=re.MULTILINE)
    program, *arguments = shlex.split(line)
    assert program == "/opt/daskinfer/bin/dask"
    assert arguments[: len(role)] == role
    options = [a for a in arguments[len(role) :] if a.startswith("--")]
    known = {
        opt for p in command.params if isinstance(p, click.Option) for opt in p.opts
    }
    assert options and set(options) <= known


def test_every_variable_has_its_line_in_the_defaults():
    defaults = (FOLDER / "daskinfer.default").read_text()
    for unit in UNITS:
        for name in re.findall(r"\$\{?(DASKINFER_\w+)", unit.read_text()):
            assert re.search(rf"^{name}=", defaults, flags=re.MULTILINE), name
