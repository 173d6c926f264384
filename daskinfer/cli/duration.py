"""Options that are a time, such as ``10s``."""

from __future__ import annotations

from typing import Any

import click

from daskinfer.fields import given_duration


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds, or a text with a unit; becomes seconds.

    Examples
    --------
    >>> Duration().convert("50ms", None, None)
    0.05
    """

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a value."""
        try:
            return given_duration("it", value, above_zero=True)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is no time above 0, such as 10s or 500ms", param, ctx)
