"""``dask infer undeploy``: free what a deployment holds on the workers."""

from __future__ import annotations

import click

import daskinfer
from daskinfer.cli.command import Command
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.duration import Duration
from daskinfer.cli.output import json_option, print_json


@click.command(cls=Command)
@click.argument("name")
@click.option(
    "--wait-timeout",
    type=Duration(),
    help="How long to wait for freed memory, such as 30s.",
)
@json_option
@connection_options
def undeploy(
    connection: Connection, name: str, wait_timeout: float | None, as_json: bool
) -> None:
    """Remove the deployment NAME; its requests that wait fail."""
    with connection.client() as client:
        daskinfer.get(client, name).undeploy(wait_timeout=wait_timeout)
    if as_json:
        print_json({"name": name, "undeployed": True})
    else:
        click.echo(f"{name} is undeployed")
