"""The versions of a deployment, one of which may be about to take over."""

from __future__ import annotations

import math
from typing import Any

from distributed.dashboard.utils import update

from daskinfer.status import VersionStatus
from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.style import (
    GREEN,
    GREY,
    ORANGE,
    number,
    state,
    table,
    text,
)

__all__ = ["Versions"]


class Versions(Component):
    """A row for each version: how far it is, and how its requests end."""

    name = "versions"
    title = "Versions"

    def build(self, **kwargs: Any) -> None:
        """Make the table."""
        columns = [
            text("version", "Version", 70),
            state("stage", "Stage", 75),
            number("share", "Share", 50, "0 %"),
            number("ready", "Ready on", 65),
            number("requests", "Requests", 70),
            number("failures", "Failed", 55),
            number("p50", "p50 [ms]", 65, "0,0.0"),
            number("p99", "p99 [ms]", 65, "0,0.0"),
        ]
        fields = [column.field for column in columns]
        self.source = self.empty(*fields, "stage_color")
        self.root = table(self.source, columns, name="versions-table", **kwargs)

    def show(self) -> None:
        """Show what the feed has read last."""
        status = self.feed.status(self.selector.name)
        versions = () if status is None else status.versions
        canary = sum(version.share for version in versions)
        rows = [_cells(version, canary) for version in versions]
        names = self.source.data
        update(self.source, {name: [row[name] for row in rows] for name in names})


def _cells(version: VersionStatus, canary: float) -> dict[str, Any]:
    colors = {"active": GREEN, "previous": GREY, "draining": GREY}
    response = version.response
    return {
        "version": version.version,
        "stage": version.stage,
        "stage_color": colors.get(version.stage, ORANGE),
        "share": 1 - canary if version.active else version.share,
        "ready": version.workers_ready,
        "requests": version.requests,
        "failures": version.failures,
        "p50": _milliseconds(response.p50),
        "p99": _milliseconds(response.p99),
    }


def _milliseconds(seconds: float | None) -> float:
    return math.nan if seconds is None else 1e3 * seconds
