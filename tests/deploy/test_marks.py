"""What no test runs or reads says at its top that it was not tried."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy"
MARK = "Not tried: "
#: The files that need no mark, and who runs or reads them.
TESTED = {
    "README.md": "test_readme.py",
    "ssh/hosts": "deploy/test_ssh.py",
    "ssh/start.sh": "deploy/test_ssh.py",
    "systemd/daskinfer.default": "deploy/test_systemd.py",
    "tls/make-certificates.sh": "deploy/test_tls.py",
}
FILES = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)


def test_there_are_no_others():
    assert set(TESTED) < set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_each_is_tested_or_says_that_it_was_not(name):
    top = (FOLDER / name).read_text("utf-8").splitlines()[:5]
    assert any(MARK in line for line in top) is (name not in TESTED)


@pytest.mark.parametrize("name", TESTED)
def test_who_tests_it_names_it(name):
    assert Path(name).name in (ROOT / "tests" / TESTED[name]).read_text("utf-8")
