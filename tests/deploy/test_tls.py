"""The certificates that deploy/tls makes, and the configuration that uses them."""

from __future__ import annotations

import asyncio
import ssl
import stat
import subprocess
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml
from distributed.comm import connect, listen
from distributed.comm.addressing import address_from_user_args
from distributed.security import Security

from tests.tools import require_tool

SCRIPT = Path(__file__).parents[2] / "deploy" / "tls" / "make-certificates.sh"
ROLES = ["scheduler", "worker", "client"]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    require_tool("openssl")
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls") / "my certificates"
    made = make(str(folder))
    assert made.returncode == 0, made.stderr
    return folder


def test_shellcheck():
    checked = subprocess.run(
        [require_tool("shellcheck"), str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.stdout == "" and checked.returncode == 0


def test_wrong_use(folder):
    for arguments in ([], ["--help"], ["a", "soon"], ["a", "1", "b"]):
        ended = make(*arguments)
        assert ended.returncode == 2
        assert "DIRECTORY [DAYS]" in ended.stderr and "pipefail" not in ended.stderr
    ended = make(str(folder))
    assert ended.returncode == 2 and "is not empty" in ended.stderr


def test_nobody_else_may_read_them(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert sorted(files) == sorted(
        ["ca.pem", "ca-key.pem", "dask.yaml"]
        + [f"{role}{part}.pem" for role in ROLES for part in ("", "-key")]
    )
    assert set(files.values()) == {0o600}


def context(purpose: ssl.Purpose, folder: Path, role: str) -> ssl.SSLContext:
    made = ssl.create_default_context(purpose, cafile=str(folder / "ca.pem"))
    made.check_hostname, made.verify_mode = False, ssl.CERT_REQUIRED
    made.load_cert_chain(folder / f"{role}.pem", folder / f"{role}-key.pem")
    return made


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Let the two talk over memory until both are satisfied."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        server.wrap_bio(up, down, server_side=True),
        client.wrap_bio(down, up, server_side=False),
    ]
    while sides:
        for side in list(reversed(sides)):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)


@pytest.mark.parametrize("role", ROLES)
def test_every_role_can_call_and_be_called(folder, role):
    shake_hands(
        context(ssl.Purpose.CLIENT_AUTH, folder, role),
        context(ssl.Purpose.SERVER_AUTH, folder, role),
    )


def test_those_of_another_authority_are_refused(folder, tmp_path):
    assert make(str(tmp_path / "other"), "7").returncode == 0
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(
            context(ssl.Purpose.CLIENT_AUTH, folder, "scheduler"),
            context(ssl.Purpose.SERVER_AUTH, tmp_path / "other", "client"),
        )


async def greet(security: Security) -> Any:
    async def answer(comm):
        await comm.write({"heard": await comm.read()})

    async with listen(
        "tls://127.0.0.1:0", answer, **security.get_listen_args("scheduler")
    ) as listener:
        comm = await connect(
            listener.contact_address, **security.get_connection_args("client")
        )
        await comm.write("hello")
        heard = await comm.read()
        await comm.close()
        return heard


def test_dask_connects_with_the_configuration(folder):
    told = yaml.safe_load((folder / "dask.yaml").read_text())
    with dask.config.set(dask.config.merge(dask.config.config, told)):
        security = Security()
        assert security.require_encryption
        given = address_from_user_args(port=8786, security=security)
        assert given.startswith("tls://")
        assert asyncio.run(greet(security)) == {"heard": "hello"}
    tls = told["distributed"]["comm"]["tls"]
    files = [tls["ca-file"], *(p for role in ROLES for p in tls[role].values())]
    assert all(Path(file).is_file() for file in files)
