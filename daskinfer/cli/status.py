"""``dask infer status``: what the scheduler knows of one deployment."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

import click

import daskinfer
from daskinfer.cli.command import Command
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.output import json_option, print_json
from daskinfer.handle import Model


@click.command(cls=Command)
@click.argument("name")
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
@json_option
@connection_options
def status(
    connection: Connection, name: str, watch: bool, interval: float, as_json: bool
) -> None:
    """Show versions, workers, load and latencies of the deployment NAME.

    With --watch and --json, one line for each look.
    """
    with connection.client() as client:
        model = daskinfer.get(client, name)
        _show(model, as_json, clear=False)
        try:
            while watch:
                time.sleep(interval)
                _show(model, as_json, clear=not as_json)
        except KeyboardInterrupt:
            return


def _show(model: Model, as_json: bool, clear: bool) -> None:
    current = model.status()
    if as_json:
        print_json(asdict(current))
    else:
        if clear:
            click.clear()
        click.echo(str(current))
    sys.stdout.flush()
