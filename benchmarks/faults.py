"""What faults cost, and what being ready for them costs while there are none.

Throughput: four workers under nannies, and a model that takes a constant time without
using the CPU, so that the workers and nothing else are the limit. As many requests as
two batches for each worker are under way all the while; in one of the runs a worker's
process is killed (``SIGKILL``) every ten seconds, and comes back as fast as it can.

Recovery: the seconds from the kill to the last answer of the batch that was running
there, which the workers that are left run again in isolated parts.

Readiness: the CPU time of the scheduler's process for each request, with a deadline for
each and a limit of the queue, against the same process while the parts that only
faults, deadlines and limits need are replaced by nothing (:func:`take_out`).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
from collections import deque
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Client, Future, wait

import daskinfer
from benchmarks.measure import (
    alternate,
    cluster,
    medians,
    scheduler_cpu,
    settle,
    wait_for,
)
from benchmarks.models import SteadyDevice
from benchmarks.report import Ratio
from scheduler_plugins.dispatcher import Dispatcher
from scheduler_plugins.lifecycle import Lifecycle
from scheduler_plugins.recovery import Recovery
from scheduler_plugins.reserving import Reservations
from scheduler_plugins.supervision import Supervision

TITLE = "Faults, and readiness for them"

WORKERS = 4
BATCH = 16
PASS_SECONDS = 0.05
UNDER_WAY = 2 * BATCH * WORKERS

X = np.zeros((1, 16), np.float32)


def run(smoke: bool = False) -> list[Ratio]:
    """Measure with faults and without."""
    seconds, first, kills = (4, 1, 1) if smoke else (30, 5, 5)
    with cluster(WORKERS, nannies=True) as client:
        ratios = [_throughput(client, seconds, first), _recovery(client, kills)]
    count, rounds = (500, 1) if smoke else (5_000, 25)
    with cluster(2) as client:
        return [*ratios, _readiness(client, count, rounds)]


def _deploy(
    client: Client, name: str, device: SteadyDevice, **options: Any
) -> daskinfer.Model:
    return daskinfer.deploy(
        client,
        device,
        name=name,
        batching=daskinfer.BatchPolicy(max_batch_size=BATCH),
        warmup=X,
        **options,
    )


# Throughput


def _throughput(client: Client, seconds: float, first: float) -> Ratio:
    model = _deploy(client, "steady", SteadyDevice(PASS_SECONDS))
    rates = medians(
        alternate(
            {
                "calm": lambda: _rate(client, model, seconds),
                "kills": lambda: _rate(client, model, seconds, first),
            },
            rounds=1,
        )
    )
    return Ratio(
        "throughput, one worker of four killed every 10 s, against none",
        rates["kills"] / rates["calm"],
        0.6,
        detail=f"{rates['kills']:,.0f}/s of {rates['calm']:,.0f}/s",
    )


def _rate(
    client: Client, model: daskinfer.Model, seconds: float, first: float | None = None
) -> float:
    """Answers per second; with kills after ``first`` seconds and every 10 from then."""
    _wait_until_whole(client, model)
    over = threading.Event()
    killer = threading.Thread(target=_kill_at_times, args=(client, first, over))
    if first is not None:
        killer.start()
    portions: deque[list[Future[Any]]] = deque(
        model.map([X] * BATCH) for _ in range(UNDER_WAY // BATCH)
    )
    started, answered = perf_counter(), 0
    while perf_counter() - started < seconds:
        answered += len(daskinfer.gather(portions.popleft()))
        portions.append(model.map([X] * BATCH))
    rate = answered / (perf_counter() - started)
    over.set()
    if first is not None:
        killer.join()
    while portions:
        daskinfer.gather(portions.popleft())
    settle(client)
    return rate


def _kill_at_times(client: Client, first: float, over: threading.Event) -> None:
    chance = random.Random(0)
    after = first
    while not over.wait(after):
        pids = client.run(os.getpid, on_error="ignore")
        os.kill(chance.choice(sorted(pids.values())), signal.SIGKILL)
        after = 10.0


def _wait_until_whole(client: Client, model: daskinfer.Model) -> None:
    wait_for(
        lambda: sum(worker.healthy for worker in model.status().workers) == WORKERS
    )


# Recovery


def _recovery(client: Client, kills: int) -> Ratio:
    model = _deploy(client, "long", SteadyDevice(4 * PASS_SECONDS))
    delays = [_recovery_seconds(client, model) for _ in range(kills)]
    return Ratio(
        "seconds from SIGKILL to the last answer of the batch",
        max(delays),
        2.0,
        at_most=True,
        detail=f"worst of {kills}; median {statistics.median(delays):.2f} s",
    )


def _recovery_seconds(client: Client, model: daskinfer.Model) -> float:
    """From the kill of a worker to the last answer of what was running there."""
    _wait_until_whole(client, model)
    pids = client.run(os.getpid)
    futures = model.map([X] * BATCH)
    wait_for(lambda: any(client.processing().values()))
    address, keys = max(client.processing().items(), key=lambda item: len(item[1]))
    started = perf_counter()
    os.kill(pids[address], signal.SIGKILL)
    theirs = [future for future in futures if future.key in keys]
    wait(theirs)
    seconds = perf_counter() - started
    assert theirs and len(daskinfer.gather(futures)) == BATCH
    del futures, theirs
    settle(client)
    return seconds


# Readiness

#: In the scheduler's process: what was taken out, to be put back.
_taken: list[tuple[type, str, Any]] = []


def _readiness(client: Client, count: int, rounds: int) -> Ratio:
    model = _deploy(
        client, "ready", SteadyDevice(), request_timeout="1h", max_queue=10**6
    )
    cpu = medians(
        alternate(
            {
                "ready": lambda: _cost(client, model, count),
                "bare": lambda: _bare_cost(client, model, count),
            },
            rounds,
        )
    )
    return Ratio(
        "scheduler's CPU per request, ready for faults against not",
        cpu["ready"] / cpu["bare"],
        1.03,
        at_most=True,
        detail=f"{1e6 * cpu['ready']:.1f} µs of {1e6 * cpu['bare']:.1f} µs",
    )


def _cost(client: Client, model: daskinfer.Model, count: int) -> float:
    """Scheduler's CPU seconds per answer."""
    started = scheduler_cpu(client)
    futures = model.map([X] * count)
    daskinfer.gather(futures)
    seconds = scheduler_cpu(client) - started
    del futures
    settle(client)
    return seconds / count


def _bare_cost(client: Client, model: daskinfer.Model, count: int) -> float:
    client.run_on_scheduler(take_out)
    try:
        return _cost(client, model, count)
    finally:
        client.run_on_scheduler(put_back)


def take_out() -> None:
    """Take out of the engine, in this process, what only faults and limits need.

    Raises
    ------
    AttributeError
        If a part is called otherwise by now: nothing would be taken out.
    """
    for owner, name, instead in (
        (Lifecycle, "_set_deadline", lambda self, request: None),
        (Lifecycle, "_turn_away_above_limit", lambda self, request, line: None),
        (Dispatcher, "_end_late", lambda self: None),
        (Recovery, "release", lambda self, now: None),
        (Supervision, "sent", lambda self, batch: None),
        (Supervision, "answered", lambda self, batch, message: None),
        (Supervision, "check", lambda self, running, now: None),
        (Reservations, "begin", lambda self: None),
        (Reservations, "release", lambda self: False),
        (Reservations, "open_to", lambda self, lane, devices: devices),
    ):
        _taken.append((owner, name, getattr(owner, name)))
        setattr(owner, name, instead)


def put_back() -> None:
    """Put in again what was taken out."""
    while _taken:
        setattr(*_taken.pop())
