"""Whether everything that is deployed can answer now, and what cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic

from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.diagnosis import unfitness

if TYPE_CHECKING:
    from scheduler_plugins.deployment import Deployment
    from scheduler_plugins.inference import InferencePlugin

_NOTHING = "nothing is deployed: call daskinfer.deploy, or set daskinfer.deployments"


class Readiness:
    """Tells whether requests to every deployment would be answered.

    Parameters
    ----------
    plugin
        Whose registry and dispatcher are asked.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin

    def __repr__(self) -> str:
        return f"<Readiness ready: {self.report()['ready']}>"

    def report(self) -> dict[str, Any]:
        """Plain data for who asks over HTTP.

        Returns
        -------
        dict
            ``ready``; the ``reason`` why not, or None; and the same by deployment.
        """
        told = self.problems()
        wrong = {name: problem for name, problem in told.items() if problem}
        reason = "; ".join(f"{name!r}: {why}" for name, why in wrong.items())
        if not told:
            reason = _NOTHING
        return {"ready": not reason, "reason": reason or None, "deployments": told}

    def problems(self) -> dict[str, str | None]:
        """Why nobody can answer now, by deployment; None where somebody can.

        What the configuration names and could not be deployed is among them.
        """
        found: dict[str, str | None] = {
            deployment.name: self.problem(deployment)
            for deployment in self.plugin.registry
        }
        for name, problem in self.plugin.configured.problems.items():
            found.setdefault(name, problem)
        return found

    def problem(self, deployment: Deployment) -> str | None:
        """Why nobody can answer with the active version, or None if somebody can."""
        plugin, name = self.plugin, deployment.name
        able = plugin.registry.can_answer(name)
        if not able:
            return plugin.registry.problem(name) or "no worker is ready"
        running = set(plugin.tasks.running())
        there = [address for address in able if address in running]
        if not there:
            return "every ready worker is paused or closing"
        line, now = plugin.dispatcher.lines[name, deployment.active], monotonic()
        shut = []
        for address in there:
            device = line.devices.get(address)
            state, _ = line.health.state(address, now)
            # One that is half-open is to be given a request: else it stays so.
            if not (device and device.stuck) and state is not BreakerState.OPEN:
                return None
            shut.append(f"{address}: {unfitness(line, address, now)}")
        return f"no worker is fit: {'; '.join(shut)}"
