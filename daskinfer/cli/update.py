"""``dask infer update``: replace a model by its next version, without a gap."""

from __future__ import annotations

from typing import Any

import click

import daskinfer
from daskinfer.canary import AbortPolicy
from daskinfer.cli.command import Command
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.fields import model_arguments, model_options
from daskinfer.cli.output import json_option
from daskinfer.cli.telling import tell


@click.command(cls=Command)
@click.argument("name")
@click.argument("source", metavar="FACTORY_OR_PATH")
@click.option("--version", required=True, help="The new version's label.")
@model_options
@click.option(
    "--manual",
    is_flag=True,
    help="Load it, but let the old version answer until `dask infer promote`.",
)
@click.option(
    "--min-ready",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Which part of the workers must be ready for it.",
)
@click.option(
    "--traffic",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="The share of requests that it answers as a canary, until promote or abort.",
)
@click.option(
    "--auto-abort",
    is_flag=True,
    help="Give the canary up by itself if it fails more often than the old version.",
)
@click.option(
    "--drop-previous", is_flag=True, help="Do not keep the old version for rollback."
)
@json_option
@connection_options
def update(
    connection: Connection,
    name: str,
    source: str,
    manual: bool,
    auto_abort: bool,
    drop_previous: bool,
    as_json: bool,
    factory_argument: tuple[str, ...],
    trusted: bool,
    batch: tuple[str, ...],
    warmup: str | None,
    no_wait: bool,
    wait_timeout: float | None,
    **options: Any,
) -> None:
    """Replace the model of deployment NAME by another version."""
    arguments = model_arguments(
        source, factory_argument, trusted, batch, warmup, no_wait, wait_timeout
    )
    arguments |= {
        "activate": "manual" if manual else "when-ready",
        "auto_abort": AbortPolicy() if auto_abort else None,
        "keep_previous": not drop_previous,
        **options,
    }
    with connection.client() as client:
        model = daskinfer.get(client, name)
        model.update(**arguments)
        tell(model, as_json)
