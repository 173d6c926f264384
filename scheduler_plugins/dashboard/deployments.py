"""The table of all deployments."""

from __future__ import annotations

import math
from typing import Any

from distributed.dashboard.utils import update

from scheduler_plugins.dashboard import wording
from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.style import (
    GREEN,
    ORANGE,
    RED,
    long_text,
    number,
    state,
    table,
    text,
)
from scheduler_plugins.dashboard.view import DeploymentRow

__all__ = ["Deployments"]


class Deployments(Component):
    """All deployments, a row for each."""

    name = "deployments"
    title = "Deployments"

    def build(self, **kwargs: Any) -> None:
        """Make the table."""
        self.source = self.empty(*_cells(DeploymentRow("", "")))
        columns = [
            text("name", "Deployment", 150),
            text("version", "Version", 70),
            state("state", "State", 90),
            text("ready", "Ready", 125),
            number("throughput", "Answers/s", 80, "0,0.0"),
            number("waiting", "Waiting", 70),
            number("oldest", "Wait [s]", 70, "0,0.00"),
            number("in_flight", "Running", 70),
            number("p50", "p50 [ms]", 75, "0,0.0"),
            number("p95", "p95 [ms]", 75, "0,0.0"),
            number("p99", "p99 [ms]", 75, "0,0.0"),
            number("requests", "Requests", 85),
            number("successes", "Answered", 85),
            number("failures", "Failed", 65),
            number("cancelled", "Cancelled", 75),
            long_text("problem", "Problem", 185),
        ]
        self.root = table(self.source, columns, name="deployments-table", **kwargs)

    def show(self) -> None:
        """Show what the feed has read last."""
        rows = [_cells(row) for row in self.feed.rows.values()]
        names = self.source.data
        update(self.source, {name: [row[name] for row in rows] for name in names})


def _cells(row: DeploymentRow) -> dict[str, Any]:
    latency = row.latency
    return {
        "name": row.name,
        "version": row.version,
        "state": row.state,
        "state_color": _color(row),
        "ready": wording.ready(row),
        "throughput": row.throughput,
        "waiting": row.waiting + row.delayed,
        "oldest": row.oldest,
        "in_flight": row.in_flight,
        "p50": _milliseconds(latency.p50),
        "p95": _milliseconds(latency.p95),
        "p99": _milliseconds(latency.p99),
        "requests": row.requests,
        "successes": row.successes,
        "failures": row.failures,
        "cancelled": row.cancelled,
        "problem": row.problem or "",
    }


def _color(row: DeploymentRow) -> str:
    if not row.is_served:
        return RED
    return GREEN if row.state == "ready" else ORANGE


def _milliseconds(seconds: float | None) -> float:
    return math.nan if seconds is None else 1e3 * seconds
