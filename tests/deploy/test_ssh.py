"""The script that starts a cluster over SSH: its style, and a dry run."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from tests.tools import require_tool

FOLDER = Path(__file__).parents[2] / "deploy" / "ssh"
SCRIPT = str(FOLDER / "start.sh")
COMMAND = ["dask", "ssh", "--remote-dask-worker", "daskinfer.cli.worker"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=30
    )


def test_shellcheck():
    checked = subprocess.run(
        [require_tool("shellcheck"), SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert checked.stdout == "" and checked.returncode == 0


def test_the_hosts_of_the_example():
    assert shlex.split(run("--dry-run").stdout) == [*COMMAND, "node1", "node2", "node3"]


def test_hosts_and_options_of_ones_own(tmp_path):
    hosts = tmp_path / "my hosts"
    hosts.write_text("a  # the first\n\n  b c\n#d\n")
    ended = run("--dry-run", str(hosts), "--", "--ssh-private-key", "my key")
    assert shlex.split(ended.stdout) == [
        *COMMAND,
        *("--ssh-private-key", "my key"),
        *("a", "b", "c"),
    ]


def test_wrong_use(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("# none\n")
    ended = run(str(empty))
    assert (ended.returncode, ended.stderr) == (2, f"{empty} names no host\n")
    ended = run("--no-such-option")
    assert ended.returncode == 2 and "start.sh [--dry-run]" in ended.stderr
    assert "pipefail" not in ended.stderr
