"""``dask infer list``: what is deployed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

import daskinfer
from daskinfer.cli.command import Command
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.output import json_option, print_json, print_table
from daskinfer.status import DeploymentStatus


@click.command(cls=Command, name="list")
@json_option
@connection_options
def listing(connection: Connection, as_json: bool) -> None:
    """List the deployments of the cluster."""
    with connection.client() as client:
        found = [model.status() for model in daskinfer.deployments(client)]
    if as_json:
        print_json([asdict(status) for status in found])
    elif found:
        titles = ("name", "version", "ready", "answers/s", "waiting", "p50", "failed")
        print_table(titles, [_row(status) for status in found])
    else:
        click.echo("Nothing is deployed: see dask infer deploy --help")


def _row(status: DeploymentStatus) -> list[Any]:
    median = status.latency.p50
    return [
        status.name,
        status.active_version,
        f"{sum(w.healthy for w in status.workers)} of {len(status.workers)} workers",
        status.throughput,
        status.waiting,
        None if median is None else f"{1e3 * median:.1f} ms",
        status.failures,
    ]
