"""Many workers that exist in the state of a scheduler alone."""

from __future__ import annotations

import math
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from distributed.metrics import monotonic
from distributed.scheduler import WorkerState

from daskinfer.policy import BatchPolicy
from scheduler_plugins.constraint import Constraint
from scheduler_plugins.deployment import Deployment, Version, WorkerFacts
from scheduler_plugins.line import LaneKey, Line
from scheduler_plugins.load import Flight
from scheduler_plugins.request import Request
from scheduler_plugins.routing import Route

KIND = "npu/Ascend910B1"
GIB = 2**30


class Fleet:
    """NPU workers with one deployment, which answer as fast as they are told.

    Parameters
    ----------
    scheduler
        One that has the plugin.
    workers
        How many.
    name
        What is deployed.
    """

    def __init__(self, scheduler: Scheduler, workers: int, name: str = "resnet50"):
        self.scheduler = scheduler
        self.plugin: Any = scheduler.plugins["daskinfer"]
        self.name = name
        self.addresses = [
            f"tcp://10.0.{i // 8}.{1 + i % 8}:4711" for i in range(workers)
        ]
        for address in self.addresses:
            self._join(address)
        self.deploy(name)
        self._waiting: list[Request] = []

    def _join(self, address: str) -> None:
        ws = WorkerState(
            address=address,
            status=Status.running,
            pid=0,
            name=address,
            nthreads=1,
            memory_limit=64 * GIB,
            local_directory="",
            nanny=None,
            server_id=address,
            scheduler=self.scheduler,
        )
        ws.metrics["memory"] = GIB
        ws.metrics["npu"] = {
            "memory-used": 0,
            "memory-total": 64 * GIB,
            "utilization": 0,
        }
        self.scheduler.workers[address] = ws
        self.scheduler.running.add(ws)
        self.plugin.registry.join(WorkerFacts(address, {"npu": KIND}, {}, {}))

    def deploy(self, name: str, version: str = "1") -> None:
        """Have all workers ready for a deployment."""
        plugin = self.plugin
        deployment = Deployment(name, "npu", (), "least-loaded", Route(version))
        made = Version(name, version, f"digest of {name}", policy=BatchPolicy())
        plugin.registry.add(deployment, made)
        plugin.dispatcher.lines.open(deployment, made)
        # As measured on devices that have a step.
        timings = [(n, 0.004 + 0.0002 * n + 0.006 * (n > 32)) for n in _SIZES]
        for address in self.addresses:
            loaded = ("npu:0", KIND, 1.5)
            plugin.registry.loaded(name, version, address, made.digest, *loaded)
            plugin.dispatcher.device_ready(name, version, address, KIND, timings)

    @property
    def line(self) -> Line:
        """That of the first deployment."""
        return self.plugin.dispatcher.lines[self.name, "1"]

    def answer(self, seconds: float, now: float | None = None) -> None:
        """Count what so many seconds bring, more on some workers than on others."""
        now, counts = monotonic() if now is None else now, self.line.counts
        for number, address in enumerate(self.addresses):
            busy = 0.45 + 0.4 * math.sin(number)
            passes = [(24, 24, 0.009)] * max(round(busy * seconds / 0.009), 1)
            counts.ran(address, passes)
            rows = sum(rows for rows, _, _ in passes)
            counts.arrived(rows)
            wave = 1 + 0.5 * math.sin(now)
            counts.succeeded([wave * (0.010 + 0.0004 * i) for i in range(rows)], now)
            metrics = self.scheduler.workers[address].metrics["npu"]
            metrics["memory-used"] = round((20 + 10 * math.cos(number)) * GIB)
            metrics["utilization"] = 100 * busy

    def ask(self, requests: int, seconds_ago: float = 0.0) -> None:
        """Let requests wait that nobody takes."""
        for number in range(requests):
            key = f"waiting-{len(self._waiting)}-{number}"
            request = Request(key, self.name, None, monotonic() - seconds_ago)
            request.lane = LaneKey(None, Constraint())
            request.constraint = Constraint()
            self.line.queue.push(request)
            self._waiting.append(request)

    def take(self) -> None:
        """Let nobody wait any more."""
        for request in self._waiting:
            self.line.queue.discard(request)
        self._waiting.clear()

    def run(self, address: str, seconds_ago: float) -> None:
        """Let a worker have had a batch for so long."""
        at = monotonic() - seconds_ago
        self.line.devices[address].send(Flight("long", 8, at, lambda: 0.02))

    def leave(self) -> None:
        """Take the workers away, as no one would answer."""
        for address in self.addresses:
            self.plugin.registry.leave(address)
            ws = self.scheduler.workers.pop(address)
            self.scheduler.running.discard(ws)


_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
