"""The commands of ``dask`` as processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tests.ssh.hosts import ROOT, free_port

PATIENCE = 60.0
DASK = (sys.executable, "-m", "dask")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, so that the project and the tests can be imported."""
    path = [*(more or {}).get("PYTHONPATH", "").split(os.pathsep), str(ROOT)]
    path += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    joined = os.pathsep.join(dict.fromkeys(filter(None, path)))
    return {**os.environ, **(more or {}), "PYTHONPATH": joined}


def infer(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``dask infer`` to its end."""
    return subprocess.run(
        [*DASK, "infer", *arguments],
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


class Server:
    """A ``dask`` command that goes on, with its output in a file."""

    def __init__(
        self, log: Path, *arguments: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*DASK, *arguments], env=environment(env), stdout=output, stderr=output
            )

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until it has written a text so many times."""
        deadline = time.monotonic() + PATIENCE
        while self.log.read_text().count(text) < times:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ends(self, signum: int | None = None) -> int:
        """Its exit status, after a signal; none of its children is left."""
        children = self.children()
        if signum is not None:
            self.process.send_signal(signum)
        status = self.process.wait(PATIENCE)
        _, left = psutil.wait_procs(children, timeout=PATIENCE)
        assert not left, left
        return status

    def stop(self) -> None:
        """End it, however."""
        if self.process.poll() is None:
            children = self.children()
            for process in (self.process, *children):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait(PATIENCE)


@contextlib.contextmanager
def scheduler(
    folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Server, str]]:
    """Run a scheduler, and give its address as well."""
    port = free_port("127.0.0.1")
    server = Server(
        folder / "scheduler.log",
        *("scheduler", "--host", "127.0.0.1", "--port", str(port)),
        *("--no-dashboard", "--no-show", *options),
        env=env,
    )
    try:
        server.wait_for("Scheduler at:")
        protocol = "tls" if "--tls-cert" in options else "tcp"
        yield server, f"{protocol}://127.0.0.1:{port}"
    finally:
        server.stop()


@contextlib.contextmanager
def workers(
    folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run ``dask infer worker``, and wait until all workers are there."""
    server = Server(
        folder / "workers.log",
        *("infer", "worker", "--no-dashboard", "--local-directory", str(folder)),
        *options,
        env=env,
    )
    try:
        server.wait_for("have joined the cluster")
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(PATIENCE)
        server.stop()
