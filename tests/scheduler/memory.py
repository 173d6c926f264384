"""What the workers of a cluster without processes have in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from scheduler_plugins.deployment import Replica, Version, WorkerFacts
from scheduler_plugins.swapping import Swapping
from scheduler_plugins.unloading import Unloading

if TYPE_CHECKING:
    from tests.scheduler.cluster import Cluster

#: What running a model once takes, in seconds.
SECONDS = 0.01


class Memory:
    """Loads and unloads models, when it is told to; or at once, where all have room.

    Parameters
    ----------
    cluster
        Whose workers these are.
    room
        How many models each of them has room for on a device.

    Attributes
    ----------
    loaded
        What workers have in memory, by address and kind of device.
    loads
        What each worker is to load: name, number, and what must have been freed before.
    leaving
        What each worker is to free: number, and the batches that must end before.
    """

    def __init__(self, cluster: Cluster, room: float) -> None:
        self.loaded: dict[str, list[str]] = {}
        self.loads: dict[str, list[tuple[str, int, Collection[int]]]] = {}
        self.leaving: dict[str, list[tuple[int, set[str]]]] = {}
        self.unloading = Unloading(self._unload)
        self.swapping = Swapping(
            SimpleNamespace(  # type: ignore[arg-type]
                registry=cluster.registry,
                dispatcher=cluster.dispatcher,
                tasks=cluster.tasks,
                unloading=self.unloading,
                loading=self,
                versions=SimpleNamespace(settle=lambda *deployments: None),
                service=SimpleNamespace(changed=lambda: None),
            )
        )
        self.swapping._turn = 0.5
        self._cluster = cluster
        self._room = room

    # What workers are told

    def join(self, address: str, doubt: str | None) -> None:
        self.loaded[address], self.loads[address], self.leaving[address] = [], [], []
        kinds = dict.fromkeys(["cpu", "npu"], "")
        limits = {} if self._room == float("inf") else dict.fromkeys(kinds, self._room)
        facts = WorkerFacts(address, kinds, {}, {}, address, limits)  # type: ignore[arg-type]
        for version, replica in self._cluster.registry.join(facts, doubt):
            self.load(version, replica)
        self.swapping.assigned(*self._cluster.registry.versions())

    def lose(self, address: str) -> None:
        self._cluster.registry.leave(address)
        self.unloading.left(address)
        for kept in (self.loaded, self.loads, self.leaving):
            del kept[address]  # type: ignore[attr-defined]

    def load(self, version: Version, replica: Replica) -> None:
        after = self.unloading.under_way(replica.address)
        replica.asked = asyncio.get_running_loop().time()
        self.loads[replica.address].append((version.name, replica.load, after))
        self._work_at_once(replica.address)

    def _unload(self, address: str, message: dict[str, Any]) -> None:
        if address in self.loaded:
            name, number = message["name"], message["unload"]
            self._forget(name, address)
            self.loads[address] = [o for o in self.loads[address] if o[0] != name]
            self.leaving[address].append((number, self._batches(name, address)))
            self._work_at_once(address)

    # What they do

    def work(self, address: str) -> bool:
        """Do the first thing that can be done, if any can."""
        for number, batches in self.leaving[address]:
            if not batches & self._batches(None, address):
                self.leaving[address].remove((number, batches))
                self.unloading.ended(address, number)
                return True
        for name, load, after in self.loads[address]:
            if not self.unloading.pending(after):
                self.loads[address].remove((name, load, after))
                self._load(name, load, address)
                return True
        return False

    def _work_at_once(self, address: str) -> None:
        """Where all have room, loading takes no time."""
        while self._room >= len(self._cluster.kinds) and self.work(address):
            pass

    def check_loaded(self, name: str, address: str) -> None:
        """A worker is sent requests for what it has."""
        assert name in self.loaded[address], f"{address} does not have {name}"

    def _batches(self, name: str | None, address: str) -> set[str]:
        """What a worker has not answered, for one model or for all."""
        cluster = self._cluster
        there = [
            *cluster.batches.get(address, []),
            *cluster.fetching.get(address, []),
            *(message for stray, message in cluster.strays if stray == address),
        ]
        return {m["batch"] for m in there if name in (None, m["name"])}

    def _forget(self, name: str, address: str) -> None:
        if name in self.loaded[address]:
            self.loaded[address].remove(name)

    def _load(self, name: str, load: int, address: str) -> None:
        cluster, kind = self._cluster, self._cluster.kinds[name]
        self._forget(name, address)
        if not cluster.registry.awaits(name, "1", address, load):
            return
        beside = [n for n in self.loaded[address] if cluster.kinds[n] == kind]
        # What was told to go before has gone, as it was waited for.
        assert len(beside) < self._room, f"{address} has no room for {name}"
        self.loaded[address].append(name)
        cluster.registry.loaded(name, "1", address, "digest", kind, kind, SECONDS)
        version = cluster.registry.version(name)
        replica = version.replicas[address]
        replica.since = asyncio.get_running_loop().time()
        version.load_seconds[""] = 0.1
        timings = [(1, SECONDS), (64, SECONDS)]
        cluster.dispatcher.device_ready(
            name, "1", address, kind, timings, replica.doubt
        )
        self.swapping.loaded(address)
