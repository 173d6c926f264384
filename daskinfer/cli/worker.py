"""``dask infer worker``: a worker for each device of this host.

Also runs as ``python -m daskinfer.cli.worker``, which is what ``dask ssh
--remote-dask-worker daskinfer.cli.worker`` starts on each host.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
from pathlib import Path
from typing import Any

import click
import dask
from distributed._signals import wait_for_signals
from distributed.cli.dask_worker import main as dask_worker
from distributed.compatibility import asyncio_run
from distributed.config import get_loop_factory
from distributed.proctitle import (
    enable_proctitle_on_children,
    enable_proctitle_on_current,
)
from distributed.utils import import_term

from daskinfer.cli.command import Command, Failed, one_line
from daskinfer.device_workers import DeviceWorkers
from daskinfer.logs import Log

logger = Log("worker")

# Those make no sense where one command starts several workers, each with a nanny.
_LEFT_OUT = {
    "contact_address",
    "dashboard_prefix",
    "listen_address",
    "n_workers",
    "nanny",
    "version",
}

_OWN_OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--device"],
        default="auto",
        show_default=True,
        help="npu, cuda, cpu, auto (the best that is there), or one certain device "
        "such as npu:1.",
    ),
    click.Option(
        ["--nworkers", "n_workers"],
        default="auto",
        show_default=True,
        help="How many of the devices to use, or on the CPU how many workers to start; "
        "auto: one worker for each device.",
    ),
    click.Option(
        ["--cpu-workers"],
        type=click.IntRange(min=0),
        help="So many workers more, which compute on the CPU.",
    ),
]


def _run(
    scheduler: str | None,
    scheduler_file: str | None,
    n_workers: str,
    nthreads: int,
    resources: str | None,
    name: str | None,
    pid_file: str,
    worker_class: str,
    tls_ca_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    **options: Any,
) -> None:
    if not (scheduler or scheduler_file or dask.config.get("scheduler-address", None)):
        raise click.UsageError(
            "where is the scheduler? Give its address, as in `dask infer worker "
            "tcp://HOST:8786`, or --scheduler-file, or set DASK_SCHEDULER_ADDRESS"
        )
    tls = {
        "tls_ca_file": tls_ca_file,
        "tls_worker_cert": tls_cert,
        "tls_worker_key": tls_key,
    }
    options |= {
        "scheduler_file": scheduler_file,
        "n_workers": _count(n_workers),
        "nthreads": nthreads or None,
        "resources": _amounts(resources),
        "name": name,
        "worker_class": import_term(worker_class),
        "security": {key: path for key, path in tls.items() if path is not None},
    }
    enable_proctitle_on_current()
    enable_proctitle_on_children()
    if pid_file:
        Path(pid_file).write_text(str(os.getpid()), "utf-8")
        atexit.register(Path(pid_file).unlink, missing_ok=True)
    try:
        asyncio_run(_serve(scheduler, options), loop_factory=get_loop_factory())
    finally:
        logger.info("All workers of this host have ended")


async def _serve(scheduler: str | None, options: dict[str, Any]) -> None:
    try:
        workers = DeviceWorkers(scheduler, **options)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    logger.info("Starting %s", workers)
    signalled = asyncio.create_task(wait_for_signals())
    served = asyncio.create_task(_until_finished(workers))
    try:
        await asyncio.wait([signalled, served], return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            await workers.close(reason=f"signal-{signalled.result()}")
            return
        await served
    except Exception as error:
        text = one_line(_root(error))
        raise Failed(f"the workers could not be started: {text}") from error
    finally:
        for task in (signalled, served):
            task.cancel()
            # Its exception, if it has one, is told above or is due to the signal.
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _until_finished(workers: DeviceWorkers) -> None:
    await workers
    logger.info("All of %s have joined the cluster", workers)
    await workers.finished()


def _root(error: BaseException) -> BaseException:
    """What an error came of: Dask's own only says that a nanny failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _count(given: str) -> int | None:
    if given == "auto":
        return None
    try:
        return int(given)
    except ValueError:
        raise click.BadParameter(
            f"{given!r} is neither a number nor auto", param_hint="--nworkers"
        ) from None


def _amounts(text: str | None) -> dict[str, float]:
    """Read resources as Dask does.

    >>> _amounts("MEM=10e9, FPGA=2")
    {'MEM': 10000000000.0, 'FPGA': 2.0}
    """
    found = {}
    for pair in (text or "").replace(",", " ").split():
        name, _, amount = pair.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            raise click.BadParameter(
                f"{pair!r} is not NAME=AMOUNT, as in MEM=10e9",
                param_hint="--resources",
            ) from None
    return found


worker = Command(
    "worker",
    context_settings={"ignore_unknown_options": True},
    params=[
        *(param for param in dask_worker.params if param.name not in _LEFT_OUT),
        *_OWN_OPTIONS,
    ],
    callback=_run,
    short_help="Start a worker for each device of this host.",
    help="Start a worker process for each device of this host, and have them join the "
    "cluster of SCHEDULER. Each sees only its own device and declares NPU=1 or GPU=1. "
    "Where there is no accelerator, workers on the CPU share its cores. All end on "
    "SIGTERM or SIGINT, and when the scheduler goes.",
)

if __name__ == "__main__":
    worker()
