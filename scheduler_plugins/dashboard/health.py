"""How each worker does, and why not."""

from __future__ import annotations

import math
from typing import Any

from distributed.dashboard.utils import update

from scheduler_plugins.dashboard import wording
from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.style import (
    GREEN,
    GREY,
    ORANGE,
    RED,
    long_text,
    number,
    state,
    table,
    text,
)
from scheduler_plugins.dashboard.view import WorkerRow

__all__ = ["Health"]

_COLORS = {
    **{"ready": GREEN, "closed": GREEN, "unfit": RED, "failed": RED, "open": RED},
    **{"half-open": ORANGE, "loading": ORANGE, "warming": ORANGE},
}


class Health(Component):
    """A row for each worker, those first that are given no requests."""

    name = "health"
    title = "Health of the workers"

    def build(self, **kwargs: Any) -> None:
        """Make the table."""
        columns = [
            text("worker", "Worker", 150),
            text("device", "Device", 60),
            state("state", "State", 65),
            state("breaker", "Breaker", 70),
            number("in_flight", "Running", 65),
            number("batches", "Batches", 65),
            number("rows", "Rows", 75),
            number("latency", "Pass [ms]", 70, "0,0.0"),
            text("utilization", "Utilization", 80),
            text("memory", "Memory", 200),
            long_text("reason", "Why it is given no requests", 400),
        ]
        fields = [column.field for column in columns]
        self.source = self.empty(*fields, "state_color", "breaker_color")
        self.root = table(self.source, columns, name="health-table", **kwargs)

    def show(self) -> None:
        """Show what the feed has read last."""
        rows = [_cells(row) for row in self.feed.workers(self.selector.name)]
        names = self.source.data
        update(self.source, {name: [row[name] for row in rows] for name in names})


def _cells(row: WorkerRow) -> dict[str, Any]:
    worker = row.status
    state = "unfit" if worker.state == "ready" and not worker.healthy else worker.state
    return {
        "worker": row.label,
        "device": worker.device or "–",
        "state": state,
        "state_color": _COLORS.get(state, GREY),
        "breaker": worker.breaker,
        "breaker_color": _COLORS.get(worker.breaker, GREY),
        "in_flight": worker.in_flight,
        "batches": worker.batches,
        "rows": worker.rows,
        "latency": math.nan if worker.latency is None else 1e3 * worker.latency,
        "utilization": wording.percent(row.utilization),
        "memory": wording.memory(row),
        "reason": worker.reason or "",
    }
