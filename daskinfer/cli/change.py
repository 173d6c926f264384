"""``dask infer rollback``, ``promote`` and ``abort``: which version answers."""

from __future__ import annotations

import click

import daskinfer
from daskinfer.cli.command import Command
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.output import json_option
from daskinfer.cli.telling import tell


@click.command(cls=Command)
@click.argument("name")
@json_option
@connection_options
def rollback(connection: Connection, name: str, as_json: bool) -> None:
    """Answer with the previous version of NAME again, from this moment on."""
    with connection.client() as client:
        model = daskinfer.get(client, name)
        model.rollback()
        tell(model, as_json)


@click.command(cls=Command)
@click.argument("name")
@click.option("--version", help="The new version's label, to be sure which it is.")
@json_option
@connection_options
def promote(
    connection: Connection, name: str, version: str | None, as_json: bool
) -> None:
    """Activate the version of NAME that an update has loaded, or that is a canary."""
    with connection.client() as client:
        model = daskinfer.get(client, name)
        model.promote(version)
        tell(model, as_json)


@click.command(cls=Command)
@click.argument("name")
@click.option("--version", help="The new version's label, to be sure which it is.")
@json_option
@connection_options
def abort(
    connection: Connection, name: str, version: str | None, as_json: bool
) -> None:
    """Give up an update of NAME that is under way, or its canary."""
    with connection.client() as client:
        model = daskinfer.get(client, name)
        model.abort(version)
        tell(model, as_json)
