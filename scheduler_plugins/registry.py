"""What is deployed, and which worker is how far with it.

Pure: events in, the loads to start out. The shell sends the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from daskinfer.exceptions import DeploymentExists, UnknownDeployment
from scheduler_plugins.deployment import (
    MAX_BREAKS,
    Breakage,
    Deployment,
    Replica,
    ReplicaState,
    Version,
    WorkerFacts,
)
from scheduler_plugins.memory import Memory

#: How often a worker that loaded something else than it should is told to try again.
MAX_RELOADS = 3


@dataclass(slots=True)
class Registry:
    """Deployments by name, workers by address.

    Examples
    --------
    >>> from scheduler_plugins.routing import Route
    >>> registry = Registry()
    >>> registry.join(WorkerFacts("tcp://w:1", {"cpu": "cpu/2-threads"}, {}, {}))
    []
    >>> deployment = Deployment("m", "cpu", (), "least-loaded", Route("1"))
    >>> [r.address for r in registry.add(deployment, Version("m", "1", "abc"))]
    ['tcp://w:1']
    >>> registry.loaded("m", "1", "tcp://w:1", "abc", "cpu", "cpu/2-threads", 0.1)
    True
    >>> [r.state.value for r in registry.version("m").replicas.values()]
    ['ready']
    """

    deployments: dict[str, Deployment] = field(default_factory=dict)
    workers: dict[str, WorkerFacts] = field(default_factory=dict)
    memory: Memory = field(init=False, repr=False)
    _loads: Iterator[int] = field(default_factory=lambda: count(1), repr=False)

    def __post_init__(self) -> None:
        self.memory = Memory(self.deployments, self._loads)

    def __iter__(self) -> Iterator[Deployment]:
        return iter(self.deployments.values())

    def add(self, deployment: Deployment, version: Version) -> list[Replica]:
        """Add a deployment with its first version.

        Returns
        -------
        list of Replica
            Those that must be loaded now.

        Raises
        ------
        DeploymentExists
            If the name is taken.
        """
        if deployment.name in self.deployments:
            taken = self.deployments[deployment.name]
            raise DeploymentExists(
                f"{deployment.name!r} is deployed already, in version "
                f"{taken.active!r}. To replace it, call update(..., version=...) of "
                f"daskinfer.get(client, {deployment.name!r}), or undeploy() to begin "
                "anew; or deploy under another name=."
            )
        self.deployments[deployment.name] = deployment
        deployment.versions[version.version] = version
        version.answered = True
        return self.assign(deployment, version)

    def assign(self, deployment: Deployment, version: Version) -> list[Replica]:
        """Have every worker that has room load a version; return who must do it now.

        Where there is none it is cold.
        """
        return [
            replica
            for worker in self.workers.values()
            if (replica := self._assign(deployment, version, worker)) is not None
        ]

    def remove(self, name: str) -> Deployment:
        """Forget a deployment.

        Raises
        ------
        UnknownDeployment
            If there is none of this name.
        """
        self.deployment(name)
        return self.deployments.pop(name)

    def deployment(self, name: str) -> Deployment:
        """Return a deployment by name.

        Raises
        ------
        UnknownDeployment
            If it does not exist; the message lists what does.
        """
        try:
            return self.deployments[name]
        except KeyError:
            there = ", ".join(map(repr, sorted(self.deployments))) or "nothing"
            raise UnknownDeployment(
                f"no deployment is named {name!r}; there is {there}"
            ) from None

    def version(self, name: str, version: str | None = None) -> Version:
        """Return a version, the active one by default.

        Raises
        ------
        UnknownDeployment
            If the deployment or its version does not exist.
        """
        deployment = self.deployment(name)
        label = deployment.active if version is None else version
        found = deployment.versions.get(label)
        if found is not None and label not in deployment.leaving:
            return found
        staying = sorted(deployment.versions.keys() - deployment.leaving)
        there = ", ".join(map(repr, staying))
        if found is not None or label in deployment.retired:
            raise UnknownDeployment(
                f"version {label!r} of {name!r} was retired; there is {there}. Use a "
                f"handle that follows the active version, {deployment.active!r}, as "
                f"daskinfer.get(client, {name!r}) gives, or pin it to another one"
            )
        raise UnknownDeployment(f"{name!r} has no version {label!r}; it has {there}")

    def join(
        self, worker: WorkerFacts, doubt: str | None = None
    ) -> list[tuple[Version, Replica]]:
        """Note a worker; return what it must load.

        With a ``doubt``, what it loads now is to be tried with one request first.
        """
        self.workers[worker.address] = worker
        assigned = [
            (version, replica)
            for deployment in self.deployments.values()
            for version in deployment.resident()
            if (replica := self._assign(deployment, version, worker)) is not None
        ]
        for _, replica in assigned:
            replica.doubt = doubt
        return assigned

    def leave(self, address: str) -> None:
        """Forget a worker and its replicas."""
        self.workers.pop(address, None)
        for version in self.versions():
            version.replicas.pop(address, None)
            version.cold.discard(address)

    def device_failed(self, address: str, reason: str, *, replaced: bool) -> None:
        """Note that nothing runs on a worker's device any more, and why.

        If its process is ``replaced``, what it served will be loaded again.
        """
        worker = self.workers.get(address)
        if worker is None:
            return
        worker.broken = reason
        for version in self.versions():
            replica = version.replicas.get(address)
            version.cold.discard(address)
            if replica is not None:
                replica.state = ReplicaState.FAILED
                if replaced:
                    replica.state = ReplicaState.LOADING
                replica.reason = reason
                # What is being loaded there will not be of use.
                replica.load = next(self._loads)

    def broke_device(
        self, name: str, version: str, address: str, reason: str, failure: Any
    ) -> None:
        """Note that a worker's device broke while it loaded a version."""
        replica = self._replica(name, version, address)
        if replica is None:
            return
        replica.failure = failure
        breakages = self.deployments[name].versions[version].breakages
        found = breakages.setdefault(self.workers[address].seat, Breakage())
        found.times += 1
        found.reason, found.failure = reason, failure

    def versions(self) -> Iterable[Version]:
        """All versions of all deployments."""
        return [v for d in self.deployments.values() for v in d.versions.values()]

    def awaits(self, name: str, version: str, address: str, load: int) -> bool:
        """Whether a report is of the load that was asked for last.

        A name may have been undeployed and deployed again while one was under way.
        """
        replica = self._replica(name, version, address)
        return replica is not None and replica.load == load

    def wants(self, name: str, version: str, address: str) -> bool:
        """Whether a worker shall have a version, however far it is with it."""
        return self._replica(name, version, address) is not None

    def loaded(
        self,
        name: str,
        version: str,
        address: str,
        digest: str,
        device: str,
        device_class: str,
        seconds: float,
        failure: Any = None,
    ) -> bool:
        """Note that a worker has loaded a version.

        Returns
        -------
        bool
            Whether it may serve it: False if nobody asked for it any more, or if
            what it loaded is something else. Then it is to be loaded again, while the
            replica says so.
        """
        replica = self._replica(name, version, address)
        if replica is None:
            return False
        expected = self.deployments[name].versions[version].digest
        replica.device, replica.device_class = device, device_class
        replica.digest, replica.seconds = digest, seconds
        if digest != expected:
            replica.state, replica.failure = ReplicaState.FAILED, failure
            replica.reason = f"it loaded digest {digest}, not {expected}"
            if replica.reloads < MAX_RELOADS:
                replica.reloads += 1
                replica.load = next(self._loads)
                replica.state = ReplicaState.LOADING
            return False
        replica.state, replica.reason, replica.failure = ReplicaState.READY, None, None
        replica.reloads = 0
        return True

    def warming(self, name: str, version: str, address: str) -> None:
        """Note that a worker has a version, and runs it in now."""
        replica = self._replica(name, version, address)
        if replica is not None and replica.state is ReplicaState.LOADING:
            replica.state = ReplicaState.WARMING

    def failed(
        self, name: str, version: str, address: str, reason: str, failure: Any
    ) -> None:
        """Note that a worker could not load a version."""
        replica = self._replica(name, version, address)
        if replica is None:
            return
        replica.state = ReplicaState.FAILED
        replica.reason, replica.failure = reason, failure
        if replica.since is not None and replica.reloads < MAX_RELOADS:
            # It was ready here before, and will be when there is room again.
            replica.reloads += 1
            self.memory.cool(self.deployments[name].versions[version], replica)

    def lacks_device(self, name: str) -> bool:
        """Whether there are workers, and none has the device that was asked for.

        Resources are what users declare, and may come; a device is there or not.
        """
        deployment = self.deployment(name)
        return bool(self.workers) and not any(
            deployment.finds_device(worker) for worker in self.workers.values()
        )

    def can_answer(self, name: str, version: str | None = None) -> list[str]:
        """Workers that can answer with a version, loading it first perhaps."""
        found = self.version(name, version)
        cold = [a for a in sorted(found.cold) if found.replicas[a].reason is None]
        return [replica.address for replica in found.ready()] + cold

    def problem(self, name: str, version: str | None = None) -> str | None:
        """Why a version is served by nobody, or None if somebody serves it."""
        deployment, found = self.deployment(name), self.version(name, version)
        if found.ready():
            return None
        if not self.workers:
            return "the cluster has no worker"
        told = []
        for address, worker in sorted(self.workers.items()):
            replica = found.replicas.get(address)
            if replica is None:
                told.append(f"{address}: {deployment.refusal(worker)}")
            else:
                why = f": {replica.reason}" if replica.reason else ""
                told.append(f"{address}: {replica.state.value}{why}")
        wants = f" needs {_amounts(deployment.resources)};" * bool(deployment.resources)
        return f"no worker is ready:{wants} " + "; ".join(told)

    def _replica(self, name: str, version: str, address: str) -> Replica | None:
        deployment = self.deployments.get(name)
        found = deployment.versions.get(version) if deployment else None
        return found.replicas.get(address) if found else None

    def _assign(
        self, deployment: Deployment, version: Version, worker: WorkerFacts
    ) -> Replica | None:
        if deployment.refusal(worker) is not None:
            return None
        replica = Replica(worker.address, next(self._loads))
        version.replicas[worker.address] = replica
        breakage = version.breakages.get(worker.seat)
        if breakage is None or breakage.times < MAX_BREAKS:
            if self.memory.has_room(deployment, version, worker):
                return replica
            self.memory.cool(version, replica)
            return None
        replica.state, replica.failure = ReplicaState.FAILED, breakage.failure
        replica.reason = (
            f"its device broke {breakage.times} times while it was loaded there, and "
            f"it is not tried again: {breakage.reason}"
        )
        return None


def _amounts(resources: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in resources)
