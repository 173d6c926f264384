"""``dask infer doctor``: whether a cluster, or this host, is fit to serve models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any

import click
from distributed import Client

import daskinfer
from daskinfer.cli.command import Command, one_line
from daskinfer.cli.connection import Connection, connection_options
from daskinfer.cli.diagnosis import Facts, Finding, diagnose, some
from daskinfer.cli.output import json_option, print_json, print_table
from daskinfer.cli.probe import ByValue, examine


@click.command(cls=Command)
@click.option(
    "--patience",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that a process may take to tell about itself.",
)
@json_option
@connection_options
@click.pass_context
def doctor(
    ctx: click.Context, connection: Connection, patience: float, as_json: bool
) -> None:
    """Examine a cluster, or this host alone where no scheduler is given.

    Looks at versions, devices (and why there are none), threads, Dask's settings and
    what is deployed. Exit status: 0 healthy, 1 not. Warnings do not count.
    """
    facts = asyncio.run(_collect(connection, patience))
    findings = diagnose(facts)
    is_healthy = not any(finding.is_fault for finding in findings)
    if as_json:
        print_json(
            {
                "healthy": is_healthy,
                "findings": [asdict(finding) for finding in findings],
                "nodes": facts.nodes,
            }
        )
    else:
        _tell(facts, findings, is_healthy)
    ctx.exit(0 if is_healthy else 1)


async def _collect(connection: Connection, patience: float) -> Facts:
    facts = Facts()
    if not connection.is_given():
        facts.nodes["this host"] = await examine(True)
        return facts
    async with connection.asynchronous_client() as client:
        information = await _scheduler_information(client)
        facts.workers = information["workers"]
        asked: dict[str, Awaitable[dict[str, Any]]] = {
            "client": examine(False),
            "scheduler": client.run_on_scheduler(ByValue(examine), False),
            **{
                address: client.run(ByValue(examine), True, workers=[address])
                for address in facts.workers
            },
        }
        answers = await asyncio.gather(
            *(asyncio.wait_for(answer, patience) for answer in asked.values()),
            return_exceptions=True,
        )
        for node, told in zip(asked, answers, strict=True):
            if isinstance(told, (TimeoutError, asyncio.TimeoutError)):
                facts.silent[node] = f"no answer within {patience:g} s"
            elif isinstance(told, BaseException):
                facts.silent[node] = one_line(told)
            else:
                # A worker's answer comes by its address.
                facts.nodes[node] = told.get(node, told)
        scheduler = facts.nodes.get("scheduler")
        if scheduler is not None and scheduler["packages"]["daskinfer"] is not None:
            facts.deployments = await _deployments(client)
    return facts


async def _scheduler_information(client: Client) -> dict[str, Any]:
    # `Client.scheduler_info` tells of the first five workers only.
    scheduler: Any = client.scheduler
    found: dict[str, Any] = await scheduler.identity()
    return found


async def _deployments(client: Client) -> list[daskinfer.DeploymentStatus]:
    asked: Any = daskinfer.deployments(client)
    models: Any = await asked
    return [await model.status() for model in models]


def _tell(facts: Facts, findings: list[Finding], is_healthy: bool) -> None:
    titles = ("node", "host", "daskinfer", "torch", "devices", "threads", "CANN")
    print_table(titles, [_row(node, told) for node, told in facts.nodes.items()])
    click.echo()
    for (kind, reason), nodes in _missing(facts).items():
        click.echo(f"no {kind} on {some(nodes)}: {reason}")
    for finding in findings:
        label = "fault" if finding.is_fault else "warning"
        click.echo(f"{label}: {finding.node}: {finding.text}")
    click.echo("healthy" if is_healthy else "not healthy")


def _missing(facts: Facts) -> dict[tuple[str, str], list[str]]:
    """Why there are no devices, and where that is the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for node, told in facts.nodes.items():
        for backend in told["devices"] or ():
            if not backend["count"]:
                about = backend["kind"], backend["reason"]
                found.setdefault(about, []).append(node)
    return found


def _row(node: str, told: dict[str, Any]) -> list[Any]:
    devices = [
        f"{backend['count']} {backend['kind']}"
        for backend in told["devices"] or ()
        if backend["count"]
    ]
    cann = told["cann"]
    return [
        node,
        told["host"],
        told["packages"]["daskinfer"],
        told["packages"]["torch"],
        ", ".join(devices) or None,
        told["torch_threads"],
        cann and (cann["version"] or cann["home"]),
    ]
