"""The commands of ``dask infer``.

Every ``dask`` command loads this package, so the commands themselves are imported when
one of them is run.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

_COMMANDS = {
    "bench": "daskinfer.cli.bench:bench",
    "deploy": "daskinfer.cli.deploy:deploy",
    "doctor": "daskinfer.cli.doctor:doctor",
    "list": "daskinfer.cli.listing:listing",
    "rollback": "daskinfer.cli.change:rollback",
    "promote": "daskinfer.cli.change:promote",
    "abort": "daskinfer.cli.change:abort",
    "status": "daskinfer.cli.status:status",
    "story": "daskinfer.cli.story:story",
    "undeploy": "daskinfer.cli.undeploy:undeploy",
    "update": "daskinfer.cli.update:update",
    "worker": "daskinfer.cli.worker:worker",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name].split(":")
        found: Any = getattr(importlib.import_module(module), name)
        return found if isinstance(found, click.Command) else None


@click.command(cls=_Commands, name="infer")
@click.version_option(package_name="daskinfer")
def infer() -> None:
    """Serve models on a Dask cluster.

    Exit status: 0 where all went well, 1 where the command failed or what it looked
    at is unhealthy, 2 where it was used wrongly.
    """
