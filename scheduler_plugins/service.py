"""The calls that clients and workers make to have something done."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic

from daskinfer import config, protocol
from daskinfer.breaker import BreakerPolicy
from daskinfer.caching import CachePolicy
from daskinfer.exceptions import DeploymentExists, UnknownDeployment
from daskinfer.logs import Log
from daskinfer.names import check_name
from daskinfer.policy import BatchPolicy
from daskinfer.retry import RetryPolicy
from daskinfer.streaming import StreamPolicy
from scheduler_plugins.cache_calls import clear_caches
from scheduler_plugins.deployment import Deployment, ReplicaState, Version
from scheduler_plugins.loading import stimulus_of
from scheduler_plugins.routing import Route

if TYPE_CHECKING:
    from scheduler_plugins.inference import InferencePlugin

logger = Log("service")


class Service:
    """Answers calls; changes nothing but through the plugin's own parts.

    Parameters
    ----------
    plugin
        Whose registry and dispatcher are asked.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin
        self._change = asyncio.Event()
        self._awaited: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return f"<Service of {self.plugin!r}>"

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        return {
            protocol.DEPLOY: self.deploy,
            protocol.WAIT_READY: self.wait_ready,
            protocol.UNDEPLOY: self.undeploy,
            protocol.CLEAR: self.clear,
            protocol.ARTIFACT: self.artifact,
            protocol.GATHER: self.plugin.fetching.packed,
        }

    def changed(self) -> None:
        """Something that somebody may wait for has changed."""
        self._change.set()
        self._change = asyncio.Event()

    async def wait_changed(self, timeout: float) -> None:
        """Wait for that.

        Raises
        ------
        TimeoutError
            If nothing has changed within so many seconds.
        """
        await asyncio.wait_for(self._change.wait(), timeout)

    async def deploy(
        self,
        name: str,
        version: str,
        policy: dict[str, Any],
        artifact: dict[str, Any],
        device: str,
        resources: dict[str, float] | None,
        placement: str,
        warmup: protocol.Payload | None,
        retry: dict[str, Any],
        request_timeout: float | None,
        max_queue: int | None,
        batch_timeout: float | None,
        breaker: dict[str, Any],
        cache: dict[str, Any] | None,
        keep_loaded: bool,
        streaming: dict[str, Any],
        client: str,
    ) -> dict[str, Any]:
        """Add a deployment and have it loaded."""
        plugin = self.plugin
        try:
            check_name("name", name)
            check_name("version", version)
        except ValueError as error:
            return {"status": "error", "message": str(error)}
        deployment = Deployment(
            name,
            device,
            tuple(sorted((resources or {}).items())),
            placement,
            Route(version),
            RetryPolicy.from_message(retry),
            request_timeout,
            max_queue,
            batch_timeout,
            BreakerPolicy(**breaker),
            None if cache is None else CachePolicy.from_message(cache),
            keep_loaded,
            StreamPolicy(**streaming),
        )
        made = Version.of(name, version, artifact, warmup, BatchPolicy(**policy))
        try:
            replicas = plugin.registry.add(deployment, made)
        except DeploymentExists as error:
            return {"status": "exists", "message": str(error)}
        try:
            plugin.distribution.check(artifact)
            plugin.dispatcher.lines.open(deployment, made)
        except (TypeError, ValueError) as error:
            plugin.registry.remove(name)
            return {"status": "error", "message": str(error)}
        logger.info(
            "%r is deployed in version %r",
            *(name, version),
            deployment=name,
            version=version,
            stimulus_id=f"daskinfer-deploy-{name}-{version}",
            limited=False,
        )
        plugin.distribution.hold(artifact, (name, version))
        plugin.versions.added(deployment)
        for replica in replicas:
            plugin.loading.load(made, replica)
        plugin.swapping.assigned(made)
        self.changed()
        return {"status": "OK"}

    async def wait_ready(
        self, name: str, version: str, timeout: float
    ) -> dict[str, Any]:
        """Wait until every worker has tried to load a version."""
        self._awaited[name, version] += 1
        try:
            return await self._settled(name, version, timeout)
        finally:
            self._awaited[name, version] -= 1
            self._awaited = +self._awaited

    def awaited(self) -> list[Version]:
        """Versions that somebody waits for."""
        deployments = self.plugin.registry.deployments
        return [
            deployments[name].versions[version]
            for name, version in self._awaited
            if name in deployments and version in deployments[name].versions
        ]

    async def _settled(self, name: str, version: str, timeout: float) -> dict[str, Any]:
        deadline = monotonic() + timeout
        warn_at = monotonic() + (config.seconds("no-worker-warning") or 0.0)
        while True:
            try:
                found = self.plugin.registry.version(name, version)
            except UnknownDeployment as error:
                return {"status": "failed", "message": str(error), "failure": None}
            settled = found.settled() or self.plugin.registry.lacks_device(name)
            if settled and self._everybody_came():
                return self._outcome(found)
            until = min(deadline, warn_at)
            try:
                await self.wait_changed(until - monotonic())
            except (asyncio.TimeoutError, TimeoutError):
                if until < deadline:
                    self._warn_of_no_worker(found)
                    warn_at = math.inf
                    continue
                problem = self.plugin.registry.problem(name, version)
                loading = [
                    r.address
                    for r in found.replicas.values()
                    if r.state in (ReplicaState.LOADING, ReplicaState.WARMING)
                ]
                if found.ready():
                    problem = f"still loading on {', '.join(sorted(loading))}"
                return {
                    "status": "timeout",
                    "message": f"{name!r} was not ready within {timeout:g} s: "
                    f"{problem}",
                }

    def _warn_of_no_worker(self, version: Version) -> None:
        """Tell who deploys that nobody is there to load it, or will be soon."""
        if version.replicas or not self._everybody_came():
            return
        problem = self.plugin.registry.problem(version.name, version.version)
        self.plugin.warn(
            f"{version.name!r} is waiting to be loaded: {problem}",
            version.name,
            version.version,
            stimulus_of(version.name, version.version),
        )

    def _everybody_came(self) -> bool:
        return self.plugin.tasks.workers() <= self.plugin.registry.workers.keys()

    def _outcome(self, version: Version) -> dict[str, Any]:
        if version.ready() or version.cold:
            return {"status": "ready"}
        failed = next(iter(version.replicas.values()), None)
        return {
            "status": "failed",
            "message": f"{version.name!r} could not be loaded: "
            f"{self.plugin.registry.problem(version.name, version.version)}",
            "failure": failed and failed.failure,
        }

    async def undeploy(self, name: str, timeout: float = 0.0) -> dict[str, Any]:
        """Remove a deployment; what waits for it fails by name.

        Waits until its memory is free on every worker, for ``timeout`` seconds at most.
        """
        plugin = self.plugin
        try:
            deployment = plugin.registry.remove(name)
        except UnknownDeployment as error:
            return {"status": "unknown", "message": str(error)}
        gone = UnknownDeployment(
            f"{name!r} was undeployed before the request was answered"
        )
        logger.info(
            "%r is undeployed",
            name,
            deployment=name,
            version=deployment.active,
            stimulus_id=f"daskinfer-undeploy-{name}",
            limited=False,
        )
        plugin.versions.removed(deployment)
        plugin.dispatcher.forget(name)
        asked: list[int] = []
        for version in deployment.versions.values():
            waiting = plugin.dispatcher.close(name, version.version)
            plugin.dispatcher.streams.end(name, version.version)
            plugin.lifecycle.fail_waiting(waiting, gone)
            asked += plugin.unloading.ask_all(version)
            plugin.distribution.release(version.artifact, (name, version.version))
        plugin.swapping.freed()
        self.changed()
        return {"status": "OK", "unfreed": await self._freed(asked, timeout)}

    async def _freed(self, asked: list[int], timeout: float) -> list[str]:
        """Wait for workers to free memory; return those that have not in time."""
        deadline = monotonic() + timeout
        while (pending := self.plugin.unloading.pending(asked)) and (
            monotonic() < deadline
        ):
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await self.wait_changed(deadline - monotonic())
        return pending

    async def artifact(self, name: str, version: str) -> dict[str, Any] | None:
        """What a worker needs to load a version; None if it is gone."""
        try:
            found = self.plugin.registry.version(name, version)
        except UnknownDeployment:
            return None
        return {"artifact": found.artifact, "warmup": found.warmup}

    async def clear(self, name: str) -> dict[str, Any]:
        """Forget the cached results of a deployment."""
        try:
            deployment = self.plugin.registry.deployment(name)
        except UnknownDeployment as error:
            return {"status": "unknown", "message": str(error)}
        silent = await clear_caches(self.plugin.tasks, deployment)
        return {"status": "OK", "silent": silent}
