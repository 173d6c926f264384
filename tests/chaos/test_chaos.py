"""The chaos test in its short form; see :mod:`tests.chaos.__main__`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Only a test that fails takes so long.
PATIENCE = 280


@pytest.mark.process
@pytest.mark.parametrize(
    "options", [["--seeds", "1"], ["--seeds", "2"], ["--seeds", "3", "--short"]]
)
def test_every_request_is_answered_once(options: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    print(run.stdout)  # shown if it fails
    assert run.returncode == 0
