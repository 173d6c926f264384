"""Enacts what becomes of the versions of each deployment.

The decisions are made in :mod:`~scheduler_plugins.rollout`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic

from daskinfer import protocol
from daskinfer.canary import AbortPolicy
from daskinfer.exceptions import InferenceError
from daskinfer.logs import Log
from daskinfer.names import check_name
from daskinfer.policy import BatchPolicy
from scheduler_plugins import rollout
from scheduler_plugins.deployment import Deployment, ReplicaState, Version
from scheduler_plugins.rollout import Action, Drain, Phase, Reroute, Update
from scheduler_plugins.trial import Trial

if TYPE_CHECKING:
    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.routing import Route

logger = Log("versions")


class Versions:
    """Has versions loaded, activated and let go.

    Parameters
    ----------
    plugin
        Whose registry, dispatcher and workers are concerned.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin
        self._trials: dict[str, Trial] = {}
        self._policies: dict[str, AbortPolicy] = {}
        self._draining: set[tuple[str, str]] = set()
        self._told: dict[str, Route] = {}

    def __repr__(self) -> str:
        return f"<Versions of {self.plugin!r}>"

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        return {
            protocol.UPDATE: self.update,
            protocol.CHANGE: self.change,
        }

    # Calls

    async def update(
        self,
        name: str,
        version: str,
        policy: dict[str, Any] | None,
        artifact: dict[str, Any],
        warmup: protocol.Payload | None,
        min_ready: float,
        manual: bool,
        share: float,
        keep_previous: bool,
        auto_abort: dict[str, Any] | None,
        timeout: float | None,
    ) -> dict[str, Any]:
        """Register a version and have it loaded.

        Answers when the update has come as far as it goes by itself, or at once without
        a ``timeout``.
        """
        plugin = self.plugin
        waits = manual or share > 0
        wanted = Update(version, min_ready, waits, share, keep_previous)
        try:
            deployment = plugin.registry.deployment(name)
            check_name("version", version)
            made = Version.of(
                name,
                version,
                artifact,
                warmup,
                deployment.policy if policy is None else BatchPolicy(**policy),
            )
            plugin.distribution.check(artifact)
            rollout.begin(deployment, wanted, made)
            logger.info(
                "%r is being updated from version %r to %r",
                *(name, deployment.active, version),
                deployment=name,
                version=version,
                stimulus_id=_stimulus(name, version),
                limited=False,
            )
            plugin.distribution.hold(artifact, (name, version))
        except (InferenceError, ValueError) as error:
            return _refusal(error)
        if auto_abort is not None:
            self._policies[name] = AbortPolicy(**auto_abort)
        plugin.dispatcher.lines.open(deployment, made)
        for replica in plugin.registry.assign(deployment, made):
            plugin.loading.load(made, replica)
        plugin.swapping.assigned(made)
        self.settle(deployment)
        plugin.service.changed()
        if timeout is None:
            return {"status": "OK"}
        return await self._progress(deployment, wanted, timeout)

    async def _progress(
        self, deployment: Deployment, update: Update, timeout: float
    ) -> dict[str, Any]:
        name, version = deployment.name, update.version
        deadline = monotonic() + timeout
        while update.phase is Phase.LOADING:
            try:
                await self.plugin.service.wait_changed(deadline - monotonic())
            except (asyncio.TimeoutError, TimeoutError):
                problem = self.plugin.registry.problem(name, version)
                return {
                    "status": "timeout",
                    "message": f"version {version!r} of {name!r} was not ready within "
                    f"{timeout:g} s, and {deployment.active!r} stays active. It goes "
                    f"on loading; model.abort() gives it up. {problem or ''}".strip(),
                }
        if update.phase in (Phase.FAILED, Phase.ABORTED):
            return {
                "status": update.phase.value,
                "message": update.reason,
                "failure": update.failure,
            }
        return {"status": "OK"}

    async def change(
        self, name: str, what: str, version: str | None = None, share: float = 0.0
    ) -> dict[str, Any]:
        """Promote, abort, roll back, or set a canary's share."""
        registry = self.plugin.registry
        try:
            deployment = registry.deployment(name)
            workers = registry.workers.values()
            if what == "promote":
                actions = rollout.promote(deployment, version, workers)
            elif what == "abort":
                told = f"the update of {name!r} was given up by a user"
                update = deployment.update
                actions = rollout.abort(deployment, told, version)
                self._tell_end(deployment, update)
            elif what == "rollback":
                actions = rollout.rollback(deployment)
            else:
                registry.version(name, version)
                actions = rollout.share(deployment, str(version), share)
        except InferenceError as error:
            return _refusal(error)
        self.enact(deployment, actions)
        return {"status": "OK", "active": deployment.active}

    # Events

    def settle(self, *deployments: Deployment) -> None:
        """Something has changed on a worker, for these deployments or for all."""
        registry = self.plugin.registry
        for deployment in deployments or list(registry):
            if deployment.update is not None:
                update = deployment.update
                found = rollout.settle(deployment, registry.workers.values())
                self._tell_end(deployment, update)
                self.enact(deployment, found)

    def worker_left(self) -> None:
        """A worker is gone, and with it perhaps the last one that a canary had."""
        for deployment in self.plugin.registry:
            if len(deployment.versions) > 1:
                self.plugin.dispatcher.waiting.reroute(deployment.name)
        self.settle()
        self.batch_ended()

    def batch_ended(self) -> None:
        """Batches have ended: judge canaries, and let go of what has no more."""
        for name in list(self._trials):
            self._judge(name)
        for name, label in list(self._draining):
            deployment = self.plugin.registry.deployment(name)
            if not self._in_flight(name, label):
                self._draining.discard((name, label))
                self.enact(deployment, rollout.drained(deployment, label))

    def removed(self, deployment: Deployment) -> None:
        """A deployment is gone, in the midst of an update perhaps."""
        update = deployment.update
        if update is not None and not update.phase.has_ended:
            update.phase = Phase.ABORTED
            update.reason = f"{deployment.name!r} was undeployed during its update"
        self._trials.pop(deployment.name, None)
        self._policies.pop(deployment.name, None)
        self._told.pop(deployment.name, None)
        self._draining = {d for d in self._draining if d[0] != deployment.name}
        self._publish()

    def added(self, deployment: Deployment) -> None:
        """There is a new deployment."""
        self._told[deployment.name] = deployment.route
        self._publish()

    def disowned(self, name: str, version: str, address: str) -> None:
        """A worker has loaded what it shall not have."""
        registry = self.plugin.registry
        if address in registry.workers and not registry.wants(name, version, address):
            self.plugin.unloading.ask(address, name, version)

    def _tell_end(self, deployment: Deployment, update: Update | None) -> None:
        """Log that an update has come to nothing, if it has."""
        if update is not None and update.phase in (Phase.FAILED, Phase.ABORTED):
            level = logging.WARNING if update.phase is Phase.FAILED else logging.INFO
            logger.log(
                level,
                "%s",
                update.reason,
                deployment=deployment.name,
                version=update.version,
                stimulus_id=_stimulus(deployment.name, update.version),
                limited=False,
            )

    # Enacting

    def enact(self, deployment: Deployment, actions: Iterable[Action]) -> None:
        """Do what was decided."""
        for action in actions:
            if isinstance(action, Reroute):
                self._reroute(deployment)
            elif isinstance(action, Drain):
                self._draining.add((deployment.name, action.version.version))
                self.batch_ended()
            else:
                self._unload(action.version)
        self.plugin.service.changed()

    def _reroute(self, deployment: Deployment) -> None:
        """Switch: from here on the version of the route answers."""
        name, plugin = deployment.name, self.plugin
        self._publish()
        message: protocol.ActivateMessage = {
            "op": protocol.ACTIVATE,
            "name": name,
            "version": deployment.active,
            "stimulus_id": f"daskinfer-activate-{name}-{deployment.active}",
        }
        for address in plugin.registry.workers:
            plugin.scheduler.worker_send(address, dict(message))
        plugin.dispatcher.waiting.reroute(name)
        if deployment.kept_loaded:
            staying = deployment.versions.keys() - deployment.leaving
            plugin.swapping.assigned(*(deployment.versions[v] for v in staying))
        self._watch(deployment)
        if self._told.get(name) != deployment.route:
            self._told[name] = deployment.route
            logger.info(
                "%r is answered by version %r%s",
                *(name, deployment.active, _canary(deployment)),
                deployment=name,
                version=deployment.active,
                stimulus_id=message["stimulus_id"],
                limited=False,
            )

    def _publish(self) -> None:
        self.plugin.routing.publish()
        self.plugin.dispatcher.running.edition = self.plugin.routing.edition

    def _unload(self, version: Version) -> None:
        plugin = self.plugin
        for request in plugin.dispatcher.close(version.name, version.version):
            line = plugin.lifecycle.place(request)
            if line is not None:
                plugin.dispatcher.waiting.enqueue(request, line)
        plugin.unloading.ask_all(version)
        plugin.distribution.release(version.artifact, (version.name, version.version))
        plugin.swapping.freed()

    def _in_flight(self, name: str, label: str) -> bool:
        return bool(self.plugin.dispatcher.lines[name, label].in_flight)

    # Canaries

    def _watch(self, deployment: Deployment) -> None:
        name, canary = deployment.name, deployment.route.canary
        self._trials.pop(name, None)
        if deployment.update is None:
            self._policies.pop(name, None)
        policy = self._policies.get(name)
        if canary is not None and policy is not None:
            lines = self.plugin.dispatcher.lines
            figures = (lines[name, v].figures for v in (canary, deployment.active))
            self._trials[name] = Trial(policy, *figures)

    def _judge(self, name: str) -> None:
        trial = self._trials.get(name)
        told = None if trial is None else trial.verdict()
        if told is None:
            return
        deployment = self.plugin.registry.deployment(name)
        reason = f"version {deployment.route.canary!r} of {name!r} was given up: {told}"
        canary = str(deployment.route.canary)
        self.plugin.warn(reason, name, canary, _stimulus(name, canary))
        self.enact(deployment, rollout.abort(deployment, reason))


def _canary(deployment: Deployment) -> str:
    route = deployment.route
    return (
        ""
        if route.canary is None
        else f" and, {route.share:.3g} of it, by {route.canary!r}"
    )


def _stimulus(name: str, version: str) -> str:
    """What logs call what is done for an update."""
    return f"daskinfer-update-{name}-{version}"


def stage(deployment: Deployment, version: Version, in_flight: int) -> str:
    """How far a version is, in a word."""
    label = version.version
    if label == deployment.active:
        return "active"
    if label == deployment.route.canary:
        return "canary"
    if label in deployment.leaving:
        return "draining"
    if label == deployment.previous:
        return "draining" if in_flight else "previous"
    update = deployment.update
    if update is not None and update.phase is Phase.READY:
        return "ready"
    states = {replica.state for replica in version.replicas.values()}
    for state in ReplicaState:
        if state in states and state is not ReplicaState.FAILED:
            return str(state.value)
    return "registered"


def _refusal(error: Exception) -> dict[str, Any]:
    return {"status": type(error).__name__, "message": str(error)}
