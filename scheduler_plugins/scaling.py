"""Tells Dask's ``Adaptive`` how many workers are wanted, and which of them may go."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic

from daskinfer import config
from scheduler_plugins.closing import Closing, cover
from scheduler_plugins.deployment import ReplicaState, Version
from scheduler_plugins.elasticity import Demand, Elasticity, Target
from scheduler_plugins.occupation import busy_seconds

if TYPE_CHECKING:
    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.line import Line

_COMING = (ReplicaState.LOADING, ReplicaState.WARMING, ReplicaState.COLD)


class Scaling:
    """Looks at what is asked for and who is there, for the policy to decide.

    Parameters
    ----------
    plugin
        Whose registry, dispatcher and workers are looked at.

    Attributes
    ----------
    demand, target
        As they were when somebody asked last.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin
        self.demand = Demand()
        self.target = Target(0, "nobody has asked so far")
        self.closing: Closing = plugin.dispatcher.closing
        self._policy = Elasticity(
            config.positive_seconds("elasticity.target-delay"),
            config.given_seconds("elasticity.cool-down"),
        )
        self._closing_to: int | None = None

    def __repr__(self) -> str:
        return f"<Scaling wanted: {self.target.workers} as {self.target.reason}>"

    # How many

    def wanted(self) -> int:
        """How many workers are wanted now."""
        now = monotonic()
        self.demand = self._look(now)
        self.target = self._policy.look(self.demand, now)
        return self.target.workers

    def report(self) -> dict[str, Any]:
        """Plain data for who asks over HTTP."""
        self.wanted()
        told = asdict(self.demand)
        del told["busy"], told["used_at"]
        return {
            "wanted": self.target.workers,
            "reason": self.target.reason,
            "start_seconds": self._policy.lag,
            **told,
        }

    def _look(self, now: float) -> Demand:
        plugin, dispatcher = self.plugin, self.plugin.dispatcher
        running = set(plugin.tasks.running())
        lines = list(dispatcher.lines.values())
        serving = {a for line in lines for a in line.devices if a in running}
        coming = self._coming(plugin.registry.versions()) - serving
        hands: set[str] = set()
        backlog, waiting, waited, unserved = 0.0, 0, 0.0, self._is_awaited()
        for line in dispatcher.lines.busy():
            able = [address for address in line.devices if address in running]
            if any(_is_free(line, address) for address in able):
                continue
            if not able and not self._comes(line):
                unserved = True
            hands.update(able)
            backlog += line.waiting_seconds()
            waiting += line.queue.count
            waited = max(waited, line.waited(now))
        active = bool(
            dispatcher.workers()
            or dispatcher.lines.busy()
            or any(line.delayed for line in lines)
        )
        used_at = max(map(self._used_at, lines), default=-math.inf)
        return Demand(
            workers=len(plugin.tasks.workers()),
            serving=len(serving),
            coming=len(coming),
            busy=busy_seconds(plugin, now),
            hands=len(hands),
            backlog=backlog,
            waiting=waiting,
            waited=waited,
            active=active,
            unserved=unserved,
            used_at=now if active else used_at,
        )

    def _starting(self) -> set[str]:
        """Workers that are yet to say what devices they have."""
        return self.plugin.tasks.workers() - self.plugin.registry.workers.keys()

    def _coming(self, versions: Iterable[Version]) -> set[str]:
        loading = {
            address
            for version in versions
            for address, replica in version.replicas.items()
            if replica.state in _COMING
        }
        return loading | self._starting()

    def _comes(self, line: Line) -> bool:
        """Whether somebody will serve a version soon."""
        version = self.plugin.registry.deployments[line.name].versions[line.version]
        return bool(self._coming([version]))

    def _is_awaited(self) -> bool:
        """Whether somebody waits for what was deployed, and nobody loads it."""
        return any(
            not version.ready() and not self._coming([version])
            for version in self.plugin.service.awaited()
        )

    def _used_at(self, line: Line) -> float:
        """When a version was last used, or became ready."""
        version = self.plugin.registry.deployments[line.name].versions[line.version]
        times = [line.used.get(a, -math.inf) for a in line.devices]
        times += [r.since for r in version.ready() if r.since is not None]
        return max(times, default=-math.inf)

    # Which

    @contextlib.contextmanager
    def closing_to(self, remaining: int | None) -> Iterator[None]:
        """Meanwhile it is asked which workers may be closed, down to so many."""
        before, self._closing_to = self._closing_to, remaining
        try:
            yield
        finally:
            self._closing_to = before

    def named(self, addresses: list[str]) -> None:
        """These workers will be closed: they are given nothing that would end it."""
        self.closing.name(addresses, monotonic())
        self.plugin.dispatcher.wake()

    def closable(self, addresses: Collection[str]) -> set[str]:
        """Those of the workers that may be closed.

        None that has a batch; nor the last that serves something, unless none is to
        remain.
        """
        plugin = self.plugin
        busy = plugin.dispatcher.workers()
        idle = [address for address in addresses if address not in busy]
        remaining = self._closing_to
        if remaining is None:
            remaining = self.wanted()
        if remaining <= 0:
            return set(idle)
        # Dask would close one that runs a user's task in the place of one that is kept.
        rest = {address for address in idle if not plugin.tasks.runs_tasks(address)}
        ready = self._ready()
        staying = plugin.tasks.workers() - rest
        rest -= cover(ready, staying, plugin.tasks.held_bytes)
        useless = rest.difference(*ready.values())
        surplus = len(plugin.tasks.workers()) - remaining
        return useless if len(useless) >= surplus else rest

    def _ready(self) -> dict[str, set[str]]:
        """By deployment, the workers that serve its active version."""
        running = set(self.plugin.tasks.running())
        return {
            deployment.name: running
            & self.plugin.dispatcher.lines[
                deployment.name, deployment.active
            ].devices.keys()
            for deployment in self.plugin.registry
        }


def _is_free(line: Line, address: str) -> bool:
    """Whether a device could begin with a request of a version at once."""
    device = line.devices[address]
    return device.idle and not device.stuck and line.health.admits(address)
