"""The way from nothing to a served model that README.md describes, line by line."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.demo.digits import load_model
from tests.ssh.hosts import (
    PATIENCE,
    ROOT,
    Host,
    free_port,
    hosts,
    launched,
    wait_until_empty,
)
from tests.tools import require_tool

pytestmark = pytest.mark.process

README = (ROOT / "README.md").read_text("utf-8")
WALK = README.partition("\n## On your own hosts\n")[2].partition("\n## ")[0]
BLOCK = re.compile(r"^ *```\w+\n(.*?)^ *```$", flags=re.MULTILINE | re.DOTALL)
INSTALL, START, DEPLOY, CALL = map(dedent, BLOCK.findall(WALK))
#: As the README has them, the only ones of their kind.
[TUNNEL] = re.findall("`(ssh -N [^`]*)`", WALK)
PAGES = re.findall(r"http://node1:8787/[\w/]+", WALK)


def commands(block: str) -> Iterator[list[str]]:
    """The words of each line, without comments."""
    for line in block.splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def get(url: str) -> tuple[int, str]:
    """A status, 0 where nobody listens, and what is answered."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


class Walk:
    """What the README says, for the hosts and the ports that there are here.

    Parameters
    ----------
    hosts
        Those that it calls node1 and node2.
    folder
        Where the user's key is.
    """

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.key = str(folder / "key")
        self.log = folder / "dask-ssh.log"
        self.ssh_port = str(hosts[0].port)
        self.port = str(free_port("0.0.0.0"))
        self.names = {"node1": hosts[0].address, "node2": hosts[1].address}
        self.names["8786"] = self.port
        self.variables: dict[str, str] = {}

    def here(self, text: str) -> str:
        """A text with the addresses of this test."""
        for name, address in self.names.items():
            text = text.replace(name, address)
        return text

    def start(self) -> contextlib.AbstractContextManager[None]:
        """Start the cluster; what is said of SSH are all options that are added."""
        [[dask, ssh, *rest]] = commands(START)
        assert (dask, ssh) == ("dask", "ssh")
        options = ["--ssh-port", self.ssh_port, "--ssh-private-key", self.key]
        options += ["--scheduler-port", self.port]
        words = [sys.executable, "-m", "dask", "ssh", *options, *map(self.here, rest)]
        return launched(words, self.log)

    def wait_for_workers(self) -> None:
        """Wait until it says what the user waits for."""
        until(lambda: self.log.read_text().count("have joined the cluster") == 2)
        # Another one where 8787 is taken.
        [port] = re.findall(r"dashboard at: *http://\S+:(\d+)/", self.log.read_text())
        self.names["8787"] = port

    def run(self, words: list[str]) -> str | None:
        """Do what a line of the second terminal says; return what is shown."""
        if words[0] == ".":
            return None
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.variables[name] = self.here(value)
            return None
        assert words[:2] == ["dask", "infer"]
        short = ["--seconds", "0.1"] if words[2] == "bench" else []
        ended = subprocess.run(
            [sys.executable, "-m", *words, *short],
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)
        return ended.stdout

    @contextlib.contextmanager
    def tunnel(self) -> Iterator[str]:
        """Give the page's address at the near end of the README's tunnel."""
        ssh, *words = shlex.split(TUNNEL)
        near = str(free_port("127.0.0.1"))
        words = [word.replace("8787:", f"{near}:", 1) for word in words]
        words = [self.here(word) for word in words]
        options = ["-p", self.ssh_port, "-i", self.key, "-F", "/dev/null"]
        options += ["-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"]
        options += ["-o", "UserKnownHostsFile=/dev/null"]
        process = subprocess.Popen([require_tool(ssh), *options, *words])
        try:
            yield f"http://localhost:{near}/inference"
        finally:
            process.terminate()
            process.wait(PATIENCE)


def test_the_extras_that_are_installed_are_there():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    [extras] = re.findall(r"\.\[([\w,]+)\]", INSTALL)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, flags=re.MULTILINE), extra


def test_two_hosts_serve_the_digits_with_a_dashboard(tmp_path):
    with hosts(tmp_path, one={}, two={}) as two_hosts:
        walk = Walk(two_hosts, tmp_path)
        with walk.start():
            walk.wait_for_workers()
            shown = {" ".join(words): walk.run(words) for words in commands(DEPLOY)}
            assert shown["dask infer status digits"].count("ready") >= 2

            page, ready = map(walk.here, PAGES)
            status, told = get(ready)
            assert (status, '"ready": true' in told) == (200, True)
            assert [get(page)[0], "Inference" in get(page)[1]] == [200, True]
            with walk.tunnel() as near:
                until(lambda: get(near)[0] == 200)

            said: dict[str, Any] = {}
            exec(walk.here(CALL), said)
            with contextlib.closing(said["client"]):
                digits = said["digits"]
                images = np.random.default_rng(0).random((20, 1, 8, 8), "float32")
                expected = load_model()(torch.from_numpy(images)).detach().numpy()
                np.testing.assert_allclose(digits(images), expected, atol=1e-4)
                assert said["scores"].shape == (1, 10)
                at = {w.address.split(":")[1] for w in digits.status().workers}
                assert at == {f"//{host.address}" for host in two_hosts}
        wait_until_empty(two_hosts)
