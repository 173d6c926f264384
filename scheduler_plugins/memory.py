"""What the memory of workers holds, and what is cold for want of room.

Pure: events in, state changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from scheduler_plugins.deployment import (
    Deployment,
    Replica,
    ReplicaState,
    Version,
    WorkerFacts,
)

#: States in which a replica takes memory, or will.
_OCCUPYING = (ReplicaState.LOADING, ReplicaState.WARMING, ReplicaState.READY)


class Memory:
    """Which versions take memory on which workers.

    Parameters
    ----------
    deployments
        All of them, by name.
    loads
        Numbers for loads, of which none comes twice.
    """

    def __init__(
        self, deployments: Mapping[str, Deployment], loads: Iterator[int]
    ) -> None:
        self._deployments = deployments
        self._loads = loads

    def __repr__(self) -> str:
        versions = [v for d in self._deployments.values() for v in d.versions.values()]
        return f"<Memory versions: {len(versions)}>"

    def occupants(
        self, worker: WorkerFacts, kind: str
    ) -> Iterator[tuple[Deployment, Version, Replica]]:
        """What a worker has, or is loading, on its device of a kind."""
        for deployment in self._deployments.values():
            if deployment.kind(worker) == kind:
                for version in deployment.versions.values():
                    replica = version.replicas.get(worker.address)
                    if replica is not None and replica.state in _OCCUPYING:
                        yield deployment, version, replica

    def all_occupants(
        self, workers: Mapping[str, WorkerFacts]
    ) -> Iterator[tuple[Deployment, Version, Replica]]:
        """What all workers have, or are loading."""
        for deployment in self._deployments.values():
            for version in deployment.versions.values():
                if len(version.cold) == len(version.replicas):
                    continue
                for address, replica in version.replicas.items():
                    if replica.state in _OCCUPYING and address in workers:
                        yield deployment, version, replica

    def has_room(
        self, deployment: Deployment, version: Version, worker: WorkerFacts
    ) -> bool:
        """Whether a version fits a worker beside what is there."""
        kind = deployment.kind(worker)
        room = worker.room.get(kind, math.inf)
        if math.isinf(room):
            return True
        others = self.occupants(worker, kind)
        taken = sum(other.nbytes for _, other, _ in others if other is not version)
        return version.nbytes <= room - taken

    def cool(self, version: Version, replica: Replica) -> None:
        """A version is loaded on a worker only when it is asked for."""
        replica.state = ReplicaState.COLD
        # What is under way will not be of use.
        replica.load = next(self._loads)
        version.cold.add(replica.address)

    def evict(self, version: Version, address: str) -> None:
        """A version makes room for others on a worker."""
        version.evictions += 1
        self.cool(version, version.replicas[address])

    def reload(self, version: Version, address: str) -> Replica:
        """A cold version is to be loaded on a worker."""
        replica = version.replicas[address]
        version.cold.discard(address)
        replica.load = next(self._loads)
        replica.state, replica.is_parked = ReplicaState.LOADING, False
        return replica

    def refuse(self, version: Version, address: str, reason: str, failure: Any) -> None:
        """A cold version will not be loaded on a worker, whatever leaves."""
        replica = version.replicas[address]
        version.cold.discard(address)
        replica.state = ReplicaState.FAILED
        replica.reason, replica.failure = reason, failure
        replica.is_refused = True

    def reconsider(self, version: Version) -> bool:
        """A version may fit by now where it never did; tell whether there is any."""
        refused = [r for r in version.replicas.values() if r.is_refused]
        for replica in refused:
            replica.is_refused, replica.reason, replica.failure = False, None, None
            if replica.state is ReplicaState.FAILED:
                self.cool(version, replica)
        return bool(refused)

    def parked(self, name: str, version: str, address: str, is_parked: bool) -> None:
        """A cold version is in the memory of a worker's host, or is not any more."""
        deployment = self._deployments.get(name)
        found = deployment and deployment.versions.get(version)
        if found and address in found.cold:
            found.replicas[address].is_parked = is_parked
