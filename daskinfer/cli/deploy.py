"""``dask infer deploy``: put a model on the cluster."""

from __future__ import annotations

from typing import Any

import click

import daskinfer
from daskinfer.breaker import BreakerPolicy
from daskinfer.cli.command import Command, Failed
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.duration import Duration
from daskinfer.cli.fields import (
    cache_of,
    model_arguments,
    model_options,
    pairs,
    policy_of,
)
from daskinfer.cli.output import json_option
from daskinfer.cli.telling import tell
from daskinfer.exceptions import DeploymentExists
from daskinfer.retry import RetryPolicy


@click.command(cls=Command)
@click.argument("source", metavar="FACTORY_OR_PATH")
@click.option("--name", help="What it is called; by default the model's own name.")
@click.option("--version", default="1", show_default=True, help="A label.")
@click.option(
    "--device",
    type=click.Choice(["auto", "npu", "cuda", "cpu"]),
    default="auto",
    show_default=True,
    help="What it runs on; auto: the best that a worker has.",
)
@click.option(
    "--resources",
    multiple=True,
    metavar="NAME=AMOUNT",
    help="What a worker must have declared. Can be repeated.",
)
@model_options
@click.option("--placement", help="least-loaded, round-robin, or a class's path.")
@click.option("--max-queue", type=int, help="How many requests may wait.")
@click.option(
    "--request-timeout",
    type=Duration(),
    help="How long a request may take, such as 2s.",
)
@click.option(
    "--batch-timeout", type=Duration(), help="How long a batch may run, such as 10s."
)
@click.option("--cache", is_flag=True, help="Cache results on the workers.")
@click.option(
    "--cache-tier",
    multiple=True,
    metavar="TIER=SIZE",
    help="Cache results, with a tier of this size, as in host=64MiB, or without the "
    "tier, as in disk=null. Can be repeated.",
)
@click.option(
    "--retry",
    multiple=True,
    metavar="KEY=VALUE",
    help="A field of RetryPolicy, as in max-attempts=2. Can be repeated.",
)
@click.option(
    "--breaker",
    multiple=True,
    metavar="KEY=VALUE",
    help="A field of BreakerPolicy, as in cooldown=10s. Can be repeated.",
)
@json_option
@connection_options
def deploy(
    connection: Connection,
    source: str,
    resources: tuple[str, ...],
    cache: bool,
    cache_tier: tuple[str, ...],
    retry: tuple[str, ...],
    breaker: tuple[str, ...],
    as_json: bool,
    factory_argument: tuple[str, ...],
    trusted: bool,
    batch: tuple[str, ...],
    warmup: str | None,
    no_wait: bool,
    wait_timeout: float | None,
    **options: Any,
) -> None:
    """Deploy a model and wait until it is ready.

    FACTORY_OR_PATH is package.module:function, which each worker calls to build the
    model, or a file of torch.export or TorchScript on this host.
    """
    arguments = model_arguments(
        source, factory_argument, trusted, batch, warmup, no_wait, wait_timeout
    )
    arguments |= {
        "resources": pairs("--resources", resources) or None,
        "cache": cache_of(cache, pairs("--cache-tier", cache_tier)),
        "retry": policy_of(RetryPolicy, "--retry", pairs("--retry", retry)),
        "breaker": policy_of(BreakerPolicy, "--breaker", pairs("--breaker", breaker)),
        **options,
    }
    with connection.client() as client:
        try:
            model = daskinfer.deploy(client, **arguments)
        except DeploymentExists as error:
            # What follows is for programs.
            what, _, _ = str(error).partition(". ")
            raise Failed(
                f"{what}; see `dask infer update` and `dask infer undeploy`"
            ) from error
        tell(model, as_json)
