"""``dask infer bench``: latency and throughput by batch size and concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import click

import daskinfer
from daskinfer.cli.command import Command, Failed
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.fields import load_example
from daskinfer.cli.measuring import Example, Measurement, measure, random_example
from daskinfer.cli.output import json_option, print_json, print_table


def whole_numbers(ctx: click.Context, param: click.Parameter, text: str) -> list[int]:
    """Read numbers that commas part, each at least 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,4,16")
    return found


@click.command(cls=Command)
@click.argument("name")
@click.option(
    "--example",
    type=click.Path(exists=True, dir_okay=False),
    help="An example input: a .npy file with rows along the batch axis, or a .npz "
    "file with the model's keyword arguments.",
)
@click.option(
    "--shape",
    help="Instead: the shape of one sample without the batch axis, such as 3,224,224.",
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    help="The type of --shape; integers are zeros.",
)
@click.option(
    "--batch-sizes",
    default="1,4,16,64",
    show_default=True,
    callback=whole_numbers,
    help="Rows of each request.",
)
@click.option(
    "--concurrency",
    default="1,8",
    show_default=True,
    callback=whole_numbers,
    help="How many requests are under way.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="How long to measure each pair of the two.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True),
    help="Draw it into this file, such as bench.png; needs matplotlib.",
)
@json_option
@connection_options
def bench(
    connection: Connection,
    name: str,
    example: str | None,
    shape: str | None,
    dtype: str,
    batch_sizes: list[int],
    concurrency: list[int],
    seconds: float,
    plot: str | None,
    as_json: bool,
) -> None:
    """Measure how fast the deployment NAME answers, seen from here.

    Each caller waits for its answer before it calls again. Where results are cached,
    equal requests measure the cache.
    """
    if (example is None) == (shape is None):
        raise click.UsageError("give an input: either --example or --shape")
    draw = None if plot is None else _plotter(plot)
    if example is not None:
        args, kwargs = load_example(example)
    else:
        args, kwargs = (), {}

    async def run() -> list[Measurement]:
        async with connection.asynchronous_client() as client:
            asked: Any = daskinfer.get(client, name)
            model = await asked
            given = (args, kwargs)
            if shape is not None:
                sample = random_example(_shape(shape), _dtype(dtype), model.batch_dim)
                given = ((sample,), {})
            rows = Example(*given, model.batch_dim)
            sizes = [1] if model.batch_dim is None else batch_sizes
            return [
                await measure(model, rows, size, callers, seconds)
                for callers in concurrency
                for size in sizes
            ]

    measured = asyncio.run(run())
    if draw is not None:
        draw(name, measured)
    if as_json:
        print_json([asdict(cell) for cell in measured])
        return
    titles = ("callers", "rows", "rows/s", "p50 ms", "p95 ms", "p99 ms", "rows/pass")
    print_table(titles, [_row(cell) for cell in measured])


def _row(cell: Measurement) -> Sequence[Any]:
    milliseconds = [1e3 * seconds for seconds in (cell.p50, cell.p95, cell.p99)]
    return [
        cell.concurrency,
        cell.batch_size,
        cell.rows_per_second,
        *milliseconds,
        cell.rows_per_pass,
    ]


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no shape such as 3,224,224", param_hint="--shape"
        ) from None


def _dtype(text: str) -> str:
    import numpy as np

    try:
        return np.dtype(text).name
    except TypeError:
        raise click.BadParameter(
            f"NumPy knows no type {text!r}", param_hint="--dtype"
        ) from None


def _plotter(path: str) -> Callable[[str, Sequence[Measurement]], None]:
    """Give what draws into a file; refuse before anything is measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Failed(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from None

    def draw(name: str, measured: Sequence[Measurement]) -> None:
        figure = Figure(figsize=(10, 4), layout="constrained")
        throughput, latency = figure.subplots(1, 2)
        for callers in dict.fromkeys(cell.concurrency for cell in measured):
            cells = [cell for cell in measured if cell.concurrency == callers]
            sizes = [cell.batch_size for cell in cells]
            label = f"{callers} under way"
            throughput.plot(
                sizes, [cell.rows_per_second for cell in cells], "o-", label=label
            )
            latency.plot(sizes, [1e3 * cell.p50 for cell in cells], "o-", label=label)
        throughput.set_ylabel("rows per second")
        latency.set_ylabel("median latency in ms")
        for axes in (throughput, latency):
            axes.set_xscale("log", base=2)
            sizes = sorted({cell.batch_size for cell in measured})
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("rows of a request")
            axes.grid(alpha=0.3)
            axes.legend()
        # A dollar sign would begin a formula.
        figure.suptitle(name, parse_math=False)
        figure.savefig(path)

    return draw
