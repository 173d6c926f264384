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
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_request_is_answered_once(seed: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seeds", str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    print(run.stdout)  # shown if it fails
    assert run.returncode == 0
