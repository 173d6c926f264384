"""What commands that change a deployment print afterwards: how it is now."""

from __future__ import annotations

from dataclasses import asdict

import click

from daskinfer.cli.output import print_json
from daskinfer.handle import Model


def tell(model: Model, as_json: bool) -> None:
    """Print a deployment's status, its first line only for people."""
    status = model.status()
    if as_json:
        print_json(asdict(status))
    else:
        click.echo(str(status).splitlines()[0])
