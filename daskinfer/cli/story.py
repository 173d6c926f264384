"""``dask infer story``: what has happened to one request."""

from __future__ import annotations

from dataclasses import asdict

import click

import daskinfer
from daskinfer.cli.command import Command
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.output import json_option, print_json


@click.command(cls=Command)
@click.argument("name")
@click.argument("key")
@json_option
@connection_options
def story(connection: Connection, name: str, key: str, as_json: bool) -> None:
    """Show what has happened to the request KEY of the deployment NAME.

    Keys are in errors, in logs and in Dask's dashboard.
    """
    with connection.client() as client:
        found = daskinfer.get(client, name).story(key)
    if as_json:
        about = {"key": key, "name": name, "state": found.state}
        entries = [asdict(entry) for entry in found]
        print_json({**about, "problem": found.problem, "entries": entries})
    else:
        click.echo(str(found))
