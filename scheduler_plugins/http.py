"""What the scheduler's HTTP server tells programs; nothing can be changed by it.

``/inference/status.json``
    all that is known of the deployments, the workers and the queue
``/inference/ready``
    200 while every deployment can answer; else 503, with the reasons
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from distributed.http.utils import RequestHandler
from distributed.metrics import time
from tornado.routing import PathMatches

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.taskstate import Observed

#: A route that every scheduler has.
_KNOWN = "/health$"


def add_routes(scheduler: Scheduler) -> None:
    """Add the routes to the scheduler's HTTP server, behind its prefix."""
    prefix = prefix_of(scheduler)
    about = {"dask_server": scheduler}
    scheduler.http_application.add_handlers(
        ".*",
        [
            (f"{prefix}/inference/status.json", StatusHandler, about),
            (f"{prefix}/inference/ready", ReadyHandler, about),
        ],
    )


def prefix_of(scheduler: Scheduler) -> str:
    """What ``--dashboard-prefix`` has put before all paths, such as ``"/dask"``."""
    for rule in scheduler.http_application.wildcard_router.rules:
        if isinstance(rule.matcher, PathMatches):
            path = rule.matcher.regex.pattern
            if path.endswith(_KNOWN):
                return str(path.removesuffix(_KNOWN))
    return ""


class _JsonHandler(RequestHandler):
    """Answers with plain data."""

    @property
    def plugin(self) -> InferencePlugin | None:
        """The plugin, once it has started."""
        found: InferencePlugin | None = self.server.plugins.get("daskinfer")
        return found

    def answer(self, data: dict[str, Any], status: int = 200) -> None:
        """Send plain data."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.finish(json.dumps(finite(data), allow_nan=False))


class ReadyHandler(_JsonHandler):
    """For probes and load balancers."""

    def get(self) -> None:
        """Tell whether every deployment can answer, and why not."""
        plugin = self.plugin
        if plugin is None:
            reason = "the scheduler plugin is starting"
            self.answer({"ready": False, "reason": reason, "deployments": {}}, 503)
            return
        report = plugin.readiness.report()
        self.answer(report, 200 if report["ready"] else 503)

    def head(self) -> None:
        """Tell it by the status alone."""
        self.get()


class StatusHandler(_JsonHandler):
    """For programs that watch."""

    async def get(self) -> None:
        """Tell all that can be known."""
        plugin = self.plugin
        if plugin is None:
            self.answer({"deployments": {}, "workers": {}}, 503)
            return
        self.answer(await status_of(plugin))


async def status_of(plugin: InferencePlugin) -> dict[str, Any]:
    """All that can be known, as plain data."""
    told = {
        name: await plugin.descriptions.status(name)
        for name in list(plugin.registry.deployments)
    }
    running = plugin.dispatcher.running.batches.values()
    lines = plugin.dispatcher.lines
    return {
        "time": time(),
        **plugin.readiness.report(),
        "deployments": {
            name: answer["deployment"]
            for name, answer in told.items()
            if answer["status"] == "OK"  # else it was undeployed meanwhile
        },
        "workers": {
            address: _worker(plugin, address, found)
            for address in sorted(plugin.tasks.workers())
            if (found := plugin.tasks.observed(address)) is not None
        },
        "queue": {
            "waiting": sum(lines.waiting(name) for name in told),
            "in_flight": sum(len(batch.requests) for batch in running),
            "batches": len(running),
            "device_seconds": lines.waiting_seconds(),
        },
        "elasticity": plugin.scaling.report(),
    }


def _worker(plugin: InferencePlugin, address: str, found: Observed) -> dict[str, Any]:
    facts = plugin.registry.workers.get(address)
    told: dict[str, Any] = {
        "name": found.name,
        "status": found.status,
        "resources": found.resources,
        "devices": {},
        "reasons": {},
        "broken": None,
        "telemetry": {
            kind: figures
            for kind in ("npu", "gpu")
            if (figures := found.telemetry(kind))
        },
    }
    if facts is not None:
        told |= {
            "devices": dict(facts.devices),
            "reasons": dict(facts.reasons),
            "broken": facts.broken,
        }
    return told


def finite(data: Any) -> Any:
    """Plain data without what JSON does not know: infinite numbers become None.

    >>> finite({"load": float("inf"), 1: (0.5, float("nan"))})
    {'load': None, '1': [0.5, None]}
    """
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
