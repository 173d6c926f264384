"""The options that say where the scheduler is, and the client that they make."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import dask
from distributed import Client
from distributed.cli.dask_worker import main as dask_worker
from distributed.comm.addressing import parse_address, parse_host_port
from distributed.security import Security
from distributed.versions import VersionMismatchWarning

from daskinfer.cli.command import Failed, one_line
from daskinfer.cli.duration import Duration

F = TypeVar("F", bound=Callable[..., Any])

TLS_OPTIONS = tuple(p for p in dask_worker.params if (p.name or "").startswith("tls_"))
"""Dask's own options for certificates."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a scheduler is, and how to reach it.

    Parameters
    ----------
    scheduler, scheduler_file
        Its address, or the file in which it has written it; without either, what
        ``scheduler-address`` says in Dask's configuration.
    timeout
        Seconds to try; None: as Dask is configured.
    tls_ca_file, tls_cert, tls_key
        Paths of certificates and key; what is left out is taken from the configuration.
    """

    scheduler: str | None = None
    scheduler_file: str | None = None
    timeout: float | None = None
    tls_ca_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def is_given(self) -> bool:
        """Whether anything says where the scheduler is."""
        return bool(
            self.scheduler
            or self.scheduler_file
            or dask.config.get("scheduler-address", None)
        )

    def arguments(self) -> dict[str, Any]:
        """For a `distributed.Client`.

        Raises
        ------
        click.UsageError
            If nothing says where the scheduler is, or what does makes no sense.
        """
        # Dask would start a cluster of its own.
        if not self.is_given():
            raise click.UsageError(
                "where is the scheduler? Give --scheduler tcp://HOST:8786 or "
                "--scheduler-file, or set DASK_SCHEDULER_ADDRESS"
            )
        tls = {
            "tls_ca_file": self.tls_ca_file,
            "tls_client_cert": self.tls_cert,
            "tls_client_key": self.tls_key,
        }
        tls = {name: path for name, path in tls.items() if path is not None}
        security = Security(**tls)
        address = self._address()
        try:
            parse_host_port(parse_address(address)[1])
        except ValueError as error:
            raise click.UsageError(
                f"{address!r} is no scheduler's address, such as tcp://HOST:8786: "
                f"{error}"
            ) from None
        has_certificates = security.get_connection_args("client").get("ssl_context")
        if address.startswith("tls:") and not has_certificates:
            raise click.UsageError(
                f"{address} asks for certificates: give --tls-ca-file, --tls-cert and "
                "--tls-key, or set distributed.comm.tls in Dask's configuration"
            )
        about: dict[str, Any] = {
            "address": address,
            "security": security,
            "set_as_default": False,
        }
        if self.timeout is not None:
            about["timeout"] = self.timeout
        return about

    def _address(self) -> str:
        if self.scheduler:
            return self.scheduler
        if not self.scheduler_file:
            return str(dask.config.get("scheduler-address"))
        try:
            return str(
                json.loads(Path(self.scheduler_file).read_text("utf-8"))["address"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise click.UsageError(
                f"{self.scheduler_file} tells no scheduler's address: {one_line(error)}"
            ) from None

    @contextmanager
    def client(self) -> Generator[Client, None, None]:
        """Connect, and close the connection afterwards."""
        with _quiet():
            arguments = self.arguments()
            try:
                client = Client(**arguments)
            except _UNREACHABLE as error:
                raise _unreached(error) from error
            with client:
                yield client

    @asynccontextmanager
    async def asynchronous_client(self) -> AsyncGenerator[Client, None]:
        """Do the same on a running event loop."""
        with _quiet():
            arguments = self.arguments()
            try:
                client = await Client(**arguments, asynchronous=True)
            except _UNREACHABLE as error:
                raise _unreached(error) from error
            async with client:
                yield client


_UNREACHABLE = (OSError, TimeoutError, ValueError)


def _unreached(error: Exception) -> Failed:
    return Failed(f"no scheduler was reached: {one_line(error)}")


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Keep Dask from writing what the command tells in its own way."""
    dasks = logging.getLogger("distributed")
    level = dasks.level
    dasks.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # `dask infer doctor` tells which versions differ.
            warnings.simplefilter("ignore", VersionMismatchWarning)
            yield
    finally:
        dasks.setLevel(level)


def connection_options(command: F) -> F:
    """Give a command the options of a `Connection`, as its argument ``connection``."""

    def collect(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        found = ctx.params.get("connection") or Connection()
        fields = {name: getattr(found, name) for name in Connection.__slots__}
        ctx.params["connection"] = Connection(**{**fields, str(param.name): value})

    options: list[click.Option] = [
        click.Option(["--scheduler"], help="The scheduler's address."),
        click.Option(
            ["--scheduler-file"],
            type=click.Path(exists=True, dir_okay=False),
            help="The file that the scheduler has written with --scheduler-file.",
        ),
        click.Option(
            ["--timeout"],
            type=Duration(),
            help="How long to try to reach the scheduler, such as 10s.",
        ),
        *(
            click.Option(list(p.opts), type=p.type, help=getattr(p, "help", None))
            for p in TLS_OPTIONS
        ),
    ]
    for option in options:
        option.expose_value = False
        option.callback = collect
    known: list[click.Parameter] = getattr(command, "__click_params__", [])
    # Reversed, as click's own decorators leave them.
    command.__click_params__ = [*known, *reversed(options)]  # type: ignore[attr-defined]
    return command
