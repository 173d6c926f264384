"""What all workers have in memory at one moment, and who could make room."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from scheduler_plugins.deployment import Deployment, Replica, ReplicaState, Version
from scheduler_plugins.room import Space, Tenant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_plugins.line import Batch
    from scheduler_plugins.lines import Lines
    from scheduler_plugins.live import LiveStream
    from scheduler_plugins.registry import Registry

#: Seconds that a load is expected to take before any was measured.
_LOAD_SECONDS = 1.0


class Survey:
    """Finds out once who has what, for many questions about that.

    To be made anew when something has changed, but for what one worker has.

    Parameters
    ----------
    registry
        What is deployed, and where.
    lines
        All versions in service.
    batches
        Those under way, and streams.
    """

    def __init__(
        self,
        registry: Registry,
        lines: Lines,
        batches: Iterable[Batch | LiveStream],
    ) -> None:
        self._registry = registry
        self._lines = lines
        self._busy = {(batch.line, batch.device.name) for batch in batches}
        self._there: defaultdict[
            tuple[str, str], list[tuple[Deployment, Version, Replica]]
        ] = defaultdict(list)
        self._spaces: dict[tuple[str, str], Space] = {}
        for occupant in registry.memory.all_occupants(registry.workers):
            deployment, _, replica = occupant
            kind = deployment.kind(registry.workers[replica.address])
            self._there[replica.address, kind].append(occupant)

    def __repr__(self) -> str:
        return f"<Survey of {len(self._there)} devices>"

    def changed(self, address: str) -> None:
        """A worker has other versions than before."""
        worker = self._registry.workers[address]
        # Where there is no limit, it does not matter who is there.
        for kind in worker.room:
            self._spaces.pop((address, kind), None)
            found = self._registry.memory.occupants(worker, kind)
            self._there[address, kind] = list(found)

    def spaces(
        self, deployment: Deployment, version: Version, addresses: Iterable[str]
    ) -> list[Space]:
        """The memory of workers, for a version that is to be loaded."""
        workers = self._registry.workers
        # The active one needs nobody beside it.
        wanting = None if version.version == deployment.active else deployment
        found = []
        for address in sorted(addresses):
            space = self.space(address, deployment.kind(workers[address]), wanting)
            if version.replicas[address].is_parked:
                space = replace(space, has_parked=True)
            found.append(space)
        return found

    def space(
        self, address: str, kind: str, wanting: Deployment | None = None
    ) -> Space:
        """What a worker has on its device of a kind, for a deployment that wants it."""
        there = self._there.get((address, kind), ())
        if any(deployment is wanting for deployment, _, _ in there):
            return self._space(address, kind, there, wanting)
        found = self._spaces.get((address, kind))
        if found is None:
            found = self._space(address, kind, there, None)
            self._spaces[address, kind] = found
        return found

    def _space(
        self,
        address: str,
        kind: str,
        there: Iterable[tuple[Deployment, Version, Replica]],
        wanting: Deployment | None,
    ) -> Space:
        tenants = tuple(self._tenant(*occupant, wanting) for occupant in there)
        room = self._registry.workers[address].room.get(kind, math.inf)
        return Space(address, room, tenants)

    def _tenant(
        self,
        deployment: Deployment,
        version: Version,
        replica: Replica,
        wanting: Deployment | None,
    ) -> Tenant:
        line = self._lines[version.name, version.version]
        is_loading = replica.state is not ReplicaState.READY
        since = math.inf if is_loading else replica.since or 0.0
        used = line.used.get(replica.address, since)
        is_wanted = line.queue.count or (line, replica.address) in self._busy
        # An update is to leave no gap.
        is_fixed = deployment.kept_loaded or deployment is wanting
        return Tenant(
            (version.name, version.version),
            version.nbytes,
            since,
            used,
            # Not sooner than it could be back.
            math.inf if is_loading or is_wanted else used + load_seconds(version),
            is_fixed and version.version in deployment.serving(),
        )


def load_seconds(version: Version) -> float:
    """How long it takes to load a version, if it is not in the memory of the host."""
    return max(version.load_seconds.values(), default=_LOAD_SECONDS)
