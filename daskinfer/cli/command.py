"""What all commands have in common: errors as one line, and an exit status."""

from __future__ import annotations

from typing import Any

import click

from daskinfer.exceptions import InferenceError

#: Longer messages are cut: a model's own may hold a whole tensor.
_LONGEST = 1000


class Failed(click.ClickException):
    """The command could not do what it was asked for; ends with status 1."""


class Command(click.Command):
    """A command that ends with one line on standard error, whatever is raised."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            raise Failed(one_line(error)) from error


def one_line(error: BaseException) -> str:
    r"""What an error says, on one line.

    The engine's own errors are for the reader. Others are told with their type: they
    come from a model, or from the system.

    Examples
    --------
    >>> one_line(ValueError("no such\nthing"))
    'ValueError: no such thing'
    >>> one_line(InferenceError("nothing is deployed"))
    'nothing is deployed'
    """
    text = " ".join(str(error).split())
    if not isinstance(error, InferenceError) or not text:
        name = type(error).__name__
        text = f"{name}: {text}" if text else name
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
