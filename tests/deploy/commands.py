"""Reading the command lines that files for deployment contain."""

from __future__ import annotations

from collections.abc import Sequence

import click
from distributed.cli.dask_scheduler import main as dask_scheduler

from daskinfer.cli.worker import worker


def check_command(words: Sequence[str]) -> dict[str, object]:
    """Have click read a command of ours, and give the values of its parameters.

    Fails where it names another command, or an option that this one does not have.
    """
    if list(words[:2]) == ["dask", "scheduler"]:
        command: click.Command = dask_scheduler
        rest = list(words[2:])
    else:
        assert list(words[:3]) == ["dask", "infer", "worker"]
        command, rest = worker, list(words[3:])
    known = {o for p in command.params if isinstance(p, click.Option) for o in p.opts}
    assert {word for word in rest if word.startswith("--")} <= known
    return command.make_context(command.name, rest).params
