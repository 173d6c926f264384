"""What commands print: for people by default, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """Give a command the option ``--json``, as its argument ``as_json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON, for other programs."
    )(command)


def print_json(value: Any) -> None:
    """Print plain data on one line."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table: with rich on a terminal, where it is installed, or aligned text.

    Parameters
    ----------
    titles
        The columns' titles.
    rows
        Cells; numbers are aligned to the right, None is a dash.
    """
    numeric = [
        any(isinstance(row[column], (int, float)) for row in rows)
        for column in range(len(titles))
    ]
    cells = [[_text(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _print_rich(titles, cells, numeric):
        return
    for line in aligned(titles, cells, numeric):
        click.echo(line)


def aligned(
    titles: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> list[str]:
    r"""Lay out a table as lines of text.

    Examples
    --------
    >>> print(*aligned(["name", "rows"], [["a", "12"]], [False, True]), sep="\n")
    name  rows
    a       12
    """
    lines = [titles, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]


def _print_rich(
    titles: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table()
    for title, number in zip(titles, numeric, strict=True):
        table.add_column(title, justify="right" if number else "left")
    for row in rows:
        # A name in brackets is no markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
    return True


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.1f}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return str(cell)
