"""A run: a scheduler, its workers and clients, and what has to be true at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import distributed.scheduler
from distributed import Client, Scheduler, Worker

import daskinfer
from tests.chaos.client import PATIENCE, deploy
from tests.chaos.judge import Tally
from tests.chaos.plan import CLIENTS, DEPLOYMENTS, WORKERS, Plan
from tests.chaos.updates import Updates
from tests.chaos.workers import Workers
from tests.cluster.scheduling_helpers import engine, left_on_worker, left_over

_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.05


async def run(plan: Plan) -> bool:
    """Carry out a plan; print what came of it, and tell whether all was right."""
    started = monotonic()
    with _validated_now_and_then():
        tally, done = await _live(plan)
    print(
        f"seed {plan.seed}, {plan.seconds:g} s (took {monotonic() - started:.0f} s): "
        f"{_listed(done)}; {_listed(tally.counts)}"
    )
    seconds, slowest = tally.slowest
    print(f"the slowest took {seconds:.1f} s: {slowest}")
    for complaint in tally.complaints:
        print(f"WRONG: {complaint}")
    if tally.complaints:
        print(
            f"again: python -m tests.chaos --seeds {plan.seed} "
            f"--seconds {plan.seconds:g} --pace {plan.pace:g}{' --short' * plan.short}"
        )
    return not tally.complaints


@contextlib.contextmanager
def _validated_now_and_then() -> Iterator[None]:
    """Have Dask's scheduler validate what it holds once a second.

    It looks at all held tasks each time that one more is, and holds thousands.
    """
    validate = distributed.scheduler.validate_unrunnable
    at = 0.0

    def validate_rarely(unrunnable: Any) -> None:
        nonlocal at
        if monotonic() >= at:
            validate(unrunnable)
            at = monotonic() + 1

    distributed.scheduler.validate_unrunnable = validate_rarely
    try:
        yield
    finally:
        distributed.scheduler.validate_unrunnable = validate


async def _live(plan: Plan) -> tuple[Tally, Counter[str]]:
    async with Scheduler(port=0, dashboard=False, validate=True) as scheduler:
        # A limit of Dask's own tests.
        scheduler.transition_counter_max = math.inf
        workers = Workers(scheduler)
        await workers.start(WORKERS)
        try:
            async with Client(scheduler.address, asynchronous=True) as client:
                for name in DEPLOYMENTS:
                    await deploy(client, name)
            _count_time_outs(scheduler, workers.done)
            tally = await _play(plan, scheduler, workers)
            await _check_nothing_remains(scheduler, tally)
            versions = engine(scheduler).registry.versions()
            workers.done["evictions"] = sum(found.evictions for found in versions)
        finally:
            await workers.close()
    return tally, workers.done


async def _play(plan: Plan, scheduler: Scheduler, workers: Workers) -> Tally:
    tally, updates = Tally(), Updates()
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(_client(plan, scheduler.address, number))
            for number in range(CLIENTS + 1)
        ]
        for client in clients:
            await _line(client, PATIENCE)
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"\n")
        lost = scheduler._workers_removed_total
        patience = plan.seconds + 2 * PATIENCE
        begun = monotonic()
        *clients, deserter = clients
        happening = asyncio.gather(
            workers.play(plan),
            updates.play(scheduler.address, plan),
            _desert(deserter, plan.deserted),
            return_exceptions=True,
        )
        lines = (_line(client, patience) for client in clients)
        reports = await asyncio.gather(*lines)
        # What goes wrong here must not cost what the clients have seen.
        for failure in filter(None, await happening):
            traceback.print_exception(failure)
            tally.complaints.append(f"the run itself failed: {failure!r}")
        print(f"{monotonic() - begun:6.1f} s: all have ended")
        workers.done["workers gone"] = scheduler._workers_removed_total - lost
        workers.done += updates.done
        tally.complaints += updates.complaints
        for report in reports:
            tally.add(json.loads(report))
        for client in clients:
            assert await client.wait() == 0
    return tally


def _count_time_outs(scheduler: Scheduler, done: Counter[str]) -> None:
    recovery = engine(scheduler).dispatcher.recovery
    take_in = recovery.timed_out

    def counting(batch: Any, requests: Any) -> None:
        done["batches given up"] += 1
        take_in(batch, requests)

    recovery.timed_out = counting  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def _client(
    plan: Plan, address: str, number: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = (address, plan.seed, plan.seconds, plan.pace, number)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos.client",
        *map(str, arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,  # of a line
        cwd=_ROOT,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _desert(client: asyncio.subprocess.Process, seconds: float) -> None:
    await asyncio.sleep(seconds)
    client.kill()


async def _line(client: asyncio.subprocess.Process, patience: float) -> bytes:
    assert client.stdout is not None
    line = await asyncio.wait_for(client.stdout.readline(), patience)
    if not line:
        raise RuntimeError("a client has ended before its time; see above")
    return line


async def _check_nothing_remains(scheduler: Scheduler, tally: Tally) -> None:
    """See to it that everybody's books are in order, and empty before long."""
    scheduler.validate_state()
    deadline = monotonic() + PATIENCE
    while (left := left_over(scheduler)) and monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    async with Client(scheduler.address, asynchronous=True) as client:
        while (there := await _on_workers(client)) and monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        for name in DEPLOYMENTS:
            status = await (await daskinfer.get(client, name)).status()
            if status.waiting or status.in_flight:
                left[f"waiting or in flight of {name}"] = status
    tally.complaints += [
        f"left: {what}: {it}" for what, it in {**left, **there}.items()
    ]


async def _on_workers(client: Client) -> dict[str, str]:
    found = await client.run(_left_on_worker, on_error="ignore")
    return {what: it for each in found.values() for what, it in each.items()}


def _left_on_worker(dask_worker: Worker) -> dict[str, str]:
    return {what: repr(it) for what, it in left_on_worker(dask_worker).items()}


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
