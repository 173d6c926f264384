"""Has workers load versions, and hears how it went."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from distributed.metrics import monotonic

from daskinfer import protocol
from daskinfer.guarding import guarded
from daskinfer.logs import Log
from scheduler_plugins.deployment import Deployment, Replica, ReplicaState, Version

if TYPE_CHECKING:
    from scheduler_plugins.inference import InferencePlugin

logger = Log("loading")


def stimulus_of(name: str, version: str) -> str:
    """What logs call the loading of a version."""
    return f"daskinfer-load-{name}-{version}"


class Loading:
    """Sends the messages about loads, and takes the workers' reports in.

    Parameters
    ----------
    plugin
        Whose registry and workers are concerned.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin

    def __repr__(self) -> str:
        return f"<Loading for {self.plugin!r}>"

    def load(self, version: Version, replica: Replica) -> None:
        """Have a worker load a version, once there is room for it."""
        deployment = self.plugin.registry.deployment(version.name)
        replica.asked = monotonic()
        message: protocol.LoadMessage = {
            "op": protocol.LOAD,
            "name": version.name,
            "version": version.version,
            "load": replica.load,
            "after": self._after(replica.address, deployment),
            "again": replica.since is not None,
            "active": deployment.active,
            "digest": version.digest,
            "device": deployment.device,
            "resources": dict(deployment.resources) or None,
            "policy": asdict(version.policy),
            "cache": None
            if deployment.cache is None
            else deployment.cache.to_message(),
            "stimulus_id": stimulus_of(version.name, version.version),
        }
        self.plugin.scheduler.worker_send(replica.address, dict(message))

    def _after(self, address: str, deployment: Deployment) -> list[int]:
        """What a worker has to unload before, as it has no room for both."""
        registry, unloading = self.plugin.registry, self.plugin.unloading
        worker = registry.workers[address]
        kind = deployment.kind(worker)
        there = registry.memory.occupants(worker, kind)
        taken = unloading.nbytes(address) + sum(v.nbytes for _, v, _ in there)
        tight = taken > worker.room.get(kind, math.inf)
        return unloading.under_way(address) if tight else []

    @guarded
    def warming(self, name: str, version: str, load: int, worker: str) -> None:
        """A worker has built a model, and runs it in."""
        if self.plugin.registry.awaits(name, version, worker, load):
            self.plugin.registry.warming(name, version, worker)
            self.plugin.service.changed()

    @guarded
    def parked(self, name: str, version: str, parked: bool, worker: str) -> None:
        """A cold version is in a host's memory, or is not any more."""
        self.plugin.registry.memory.parked(name, version, worker, parked)

    @guarded
    def unloaded(self, name: str, version: str, unload: int, worker: str) -> None:
        """A worker has freed what a version took."""
        self.plugin.unloading.ended(worker, unload)
        self.plugin.service.changed()

    @guarded
    def loaded(
        self,
        name: str,
        version: str,
        load: int,
        digest: str,
        failure: protocol.Failure | None,
        device: str,
        device_class: str,
        timings: list[tuple[int, float]],
        seconds: float,
        broken: str,
        nbytes: int,
        source: str,
        kind: str,
        worker: str,
    ) -> None:
        """A worker has loaded a version, or could not."""
        awaited = self.plugin.registry.awaits(name, version, worker, load)
        if broken and not awaited:
            self.plugin.replacing.device_failed(worker, broken)
        elif not awaited:
            self.plugin.versions.disowned(name, version, worker)
            return
        elif broken:
            self.plugin.replacing.loading_failed(name, version, worker, broken, failure)
        elif failure is not None and not digest:
            reason = failure["exception_text"]
            logger.warning(
                "%s could not load %r %r: %s",
                *(worker, name, version, reason),
                deployment=name,
                version=version,
                stimulus_id=stimulus_of(name, version),
            )
            self.plugin.registry.failed(name, version, worker, reason, failure)
            self.plugin.dispatcher.workers_changed()
        elif self.plugin.registry.loaded(
            name, version, worker, digest, device, device_class, seconds, failure
        ):
            found = self.plugin.registry.version(name, version)
            found.nbytes = nbytes
            found.loads[source] += 1
            found.load_seconds[source] = seconds
            replica = found.replicas[worker]
            replica.since = monotonic()
            self.plugin.dispatcher.device_ready(
                name, version, worker, device_class, timings, replica.doubt, kind
            )
            logger.info(
                "%s has loaded %r %r on %s in %.3g s",
                *(worker, name, version, device, seconds),
                deployment=name,
                version=version,
                stimulus_id=stimulus_of(name, version),
            )
            self.plugin.swapping.loaded(worker)
        else:
            self._reload(name, version, worker)
        self.plugin.versions.settle()
        self.plugin.versions.batch_ended()  # on a device that is broken
        self.plugin.service.changed()

    def _reload(self, name: str, version: str, worker: str) -> None:
        """A worker has loaded something else than it should: let it try again."""
        found = self.plugin.registry.version(name, version)
        replica = found.replicas[worker]
        logger.warning(
            "%s: %s %r: %s",
            *(worker, name, version, replica.reason),
            deployment=name,
            version=version,
            stimulus_id=stimulus_of(name, version),
        )
        if replica.state is ReplicaState.LOADING:
            self.load(found, replica)
        self.plugin.dispatcher.workers_changed()
