"""Hosts to be reached by SSH, on this one: a server for each loopback address.

Nothing outside a test's folder is read or written but ``/run/sshd``, which OpenSSH
wants to find, empty, when root starts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tests.tools import require_tool

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
_MARK = "TEST_HOST"


class Host:
    """An SSH server on a loopback address, and what was started through it.

    Parameters
    ----------
    address, port
        Where it listens.
    folder
        For its files; one for each server.
    key
        The user's private key that it admits.
    environment
        Variables of every process that is started through it.
    """

    def __init__(
        self,
        address: str,
        port: int,
        folder: Path,
        key: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.address = address
        self.port = port
        self._mark = uuid.uuid4().hex
        folder.mkdir()
        make_key(folder / "host_key")
        python_path = [environment.get("PYTHONPATH", ""), str(ROOT)]
        variables = {
            "OMP_NUM_THREADS": "1",
            "DASK_DASKINFER__ARTIFACTS__DIRECTORY": str(folder / "artifacts"),
            "DASK_TEMPORARY_DIRECTORY": str(folder),
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
            _MARK: self._mark,
        }
        told = " ".join(f'"{name}={value}"' for name, value in variables.items())
        config = folder / "sshd_config"
        config.write_text(
            f"""
            ListenAddress {address}
            Port {port}
            HostKey {folder / "host_key"}
            AuthorizedKeysFile {key}.pub
            PidFile none
            AuthenticationMethods publickey
            PermitRootLogin prohibit-password
            StrictModes no
            UsePAM no
            PrintMotd no
            PrintLastLog no
            SetEnv {told}
            """
        )
        self.log = folder / "log"
        command = [require_tool("sshd"), "-D", "-e", "-f", str(config)]
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with self.log.open("wb") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_until_reachable(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with socket.create_connection((self.address, self.port), timeout=1):
                    return
            except OSError:
                ended = self._server.poll()
                if ended is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"sshd ended with {ended}: {self.log.read_text()}"
                    ) from None
                time.sleep(0.05)

    def processes(self, *words: str) -> list[psutil.Process]:
        """What runs of all that was started through this host.

        Parameters
        ----------
        words
            Only those with all of these in their command lines.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) != self._mark:
                    continue
                line = " ".join(process.cmdline())
                is_gone = process.status() == psutil.STATUS_ZOMBIE
                if not is_gone and all(word in line for word in words):
                    found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        """The workers' processes, without their nannies'."""
        return [
            process
            for process in self.processes("spawn_main")
            if "resource_tracker" not in " ".join(process.cmdline())
        ]

    def stop(self) -> None:
        """End the server, and whatever is left."""
        self._server.terminate()
        self._server.wait(PATIENCE)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def make_key(path: Path) -> Path:
    """Make a pair of keys without a passphrase."""
    command = ["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run([require_tool("ssh-keygen"), *command], check=True)
    return path


def free_port(*addresses: str) -> int:
    """Find a port that nothing listens on, at none of the addresses."""
    for _ in range(100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            port = 0
            for address in addresses:
                probe = stack.enter_context(socket.socket())
                probe.bind((address, port))
                port = probe.getsockname()[1]
            return port
    raise RuntimeError("no port was free")


@contextlib.contextmanager
def hosts(folder: Path, **environments: Mapping[str, str]) -> Iterator[list[Host]]:
    """Run servers on 127.0.0.1, 127.0.0.2, ...; one for each environment, by name."""
    key = make_key(folder / "key")
    addresses = [f"127.0.0.{number}" for number, _ in enumerate(environments, 1)]
    port = free_port(*addresses)
    started: list[Host] = []
    try:
        for address, (name, about) in zip(addresses, environments.items(), strict=True):
            started.append(Host(address, port, folder / name, key, about))
        for host in started:
            host.wait_until_reachable()
        yield started
    finally:
        for host in started:
            host.stop()


@contextlib.contextmanager
def dask_ssh(hosts: list[Host], folder: Path, *options: str) -> Iterator[str]:
    """Run ``dask ssh`` with our workers on hosts, and end it as Ctrl-C does.

    Yields
    ------
    str
        The scheduler's address.
    """
    port = free_port("0.0.0.0")
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{host.address}\n" for host in hosts))
    command = [
        *(sys.executable, "-m", "dask", "ssh"),
        *("--hostfile", str(hostfile)),
        *("--scheduler-port", str(port)),
        *("--ssh-port", str(hosts[0].port)),
        *("--ssh-private-key", str(folder / "key")),
        *("--remote-dask-worker", "daskinfer.cli.worker"),
        *options,
    ]
    with launched(command, folder / "dask-ssh.log"):
        yield f"tcp://{hosts[0].address}:{port}"


@contextlib.contextmanager
def launched(command: list[str], log: Path) -> Iterator[None]:
    """Run a ``dask ssh`` command line, and end it as Ctrl-C does.

    Parameters
    ----------
    command
        Its words.
    log
        Where all that it shows goes, at once.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment
        )
    try:
        yield
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(PATIENCE) == 0, log.read_text()
    except BaseException:
        print(log.read_text(errors="replace"))
        raise
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(PATIENCE)


def wait_until_empty(hosts: list[Host]) -> None:
    """Wait until all that was started through the hosts has ended."""
    deadline = time.monotonic() + PATIENCE
    while left := [process for host in hosts for process in host.processes()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
