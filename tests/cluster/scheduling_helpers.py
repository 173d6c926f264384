"""Looking into the engine of a cluster in this process."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from distributed.utils_test import async_poll_for

import daskinfer
from daskinfer import BatchPolicy, Model
from scheduler_plugins import InferencePlugin
from tests.cluster.helpers import until

#: One request of one row.
ONE = np.ones((1, 1))


def engine(scheduler: Scheduler) -> InferencePlugin:
    """The plugin that serves a scheduler."""
    plugin: InferencePlugin = scheduler.plugins["daskinfer"]  # type: ignore[assignment]
    return plugin


async def deploy(client: Client, model: Any, name: str = "m", **kwargs: Any) -> Model:
    """Deploy a model under a short name; keywords of the policy go to the policy."""
    policy = {
        key: kwargs.pop(key)
        for key in BatchPolicy.__dataclass_fields__
        if key in kwargs
    }
    return await daskinfer.deploy(
        client, model, name=name, batching=BatchPolicy(**policy), **kwargs
    )


def waiting(scheduler: Scheduler, name: str = "m") -> int:
    """How many requests of a deployment stand in the queue."""
    return len(engine(scheduler).dispatcher.lines[name, "1"].queue)


async def queued(scheduler: Scheduler, count: int, name: str = "m") -> None:
    """Wait until so many requests of a deployment stand in the queue."""
    await until(lambda: waiting(scheduler, name) == count)


def left_over(scheduler: Scheduler, *workers: Worker) -> dict[str, Any]:
    """What scheduler, workers and engine still know of any request."""
    plugin = engine(scheduler)
    dispatcher = plugin.dispatcher
    found: dict[str, Any] = {
        "tasks": scheduler.tasks,
        "groups": scheduler.task_groups,
        "unrunnable": scheduler.unrunnable,
        "requests": plugin.requests,
        "doomed": plugin.lifecycle.doomed,
        "deadlines": dispatcher.deadlines.keys(),
        "delayed": dispatcher.recovery.delayed.keys(),
        "reserved": [d for d in [dispatcher.chooser.reserved] if len(d)],
        "batches": dispatcher.running.batches,
        "unwanted": dispatcher.running.unwanted,
        "streams": list(dispatcher.streams.live),
        "queued": [line for line in dispatcher.lines.values() if len(line.queue)],
        "in flight": [line for line in dispatcher.lines.values() if line.in_flight],
        "flights": [d for d in dispatcher.lines._devices.values() if d.under_way],
    }
    for ws in scheduler.workers.values():
        found[f"processing on {ws.address}"] = ws.processing
        found[f"long-running on {ws.address}"] = ws.long_running
    for worker in workers:
        found |= left_on_worker(worker)
    return {what: left for what, left in found.items() if left}


def left_on_worker(dask_worker: Worker) -> dict[str, Any]:
    """What a worker still knows of any request."""
    runtime: Any = dask_worker.plugins["daskinfer-runtime"]
    found = {
        f"data of {dask_worker.address}": dict(dask_worker.data),
        f"tasks of {dask_worker.address}": dask_worker.state.tasks,
        f"jobs of {dask_worker.address}": runtime.jobs,
        f"streams of {dask_worker.address}": runtime.streams.count,
    }
    return {what: left for what, left in found.items() if left}


async def nothing_is_left(scheduler: Scheduler, *workers: Worker) -> None:
    """Wait until scheduler, workers and engine have forgotten every request."""

    def remains() -> dict[str, Any]:
        return left_over(scheduler, *workers)

    # An exception that was raised here holds its own future, in a cycle, and is held
    # itself until the event loop goes on.
    await asyncio.sleep(0)
    gc.collect()
    # Less than a test of a cluster may take, so that it can say what remains.
    await async_poll_for(
        lambda: not remains(), 15, fail_func=lambda: pytest.fail(f"left: {remains()}")
    )
