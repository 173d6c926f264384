"""What each worker's device is doing."""

from __future__ import annotations

import math
from typing import Any

from bokeh.layouts import row
from bokeh.models import (
    BasicTicker,
    DataRange1d,
    FixedTicker,
    NumeralTickFormatter,
    OpenURL,
    Range1d,
    TapTool,
)
from bokeh.plotting import figure
from distributed.dashboard.utils import update
from distributed.utils import url_escape

from scheduler_plugins.dashboard import wording
from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    hover,
    plot,
)
from scheduler_plugins.dashboard.view import WorkerRow

__all__ = ["Load"]

#: More of them are told apart by pointing at them.
_LABELLED = 12
_PANELS = (
    ("busy", "Device busy", "busy_color"),
    ("memory", "Memory", "memory_color"),
    ("share", "Share of rows", "share_color"),
)


class Load(Component):
    """One bar for each worker: time on the device, memory, and share of the rows.

    The time is that of the last ten seconds, with batches of all deployments; the share
    is that of the deployment's rows in the same time.
    """

    name = "workers"
    title = "Workers"

    def build(self, **kwargs: Any) -> None:
        """Make the three plots, whose rows are the workers."""
        self.source = self.empty(
            *("place", "worker", "escaped", "device", "state", "busy", "memory"),
            *("share", "busy_color", "memory_color", "share_color", "memory_told"),
            *("utilization", "queue"),
        )
        self.places = Range1d(-0.5, 0.5)
        self.ticker = FixedTicker(ticks=[])
        height = kwargs.pop("height", None)
        panels = [
            self._panel(field, title, color, height=height, sizing_mode="stretch_both")
            for field, title, color in _PANELS
        ]
        self.first = panels[0]
        for panel in panels[1:]:
            panel.yaxis.visible = False
        kwargs.setdefault("sizing_mode", "stretch_both")
        self.root = row(panels, name="workers-plot", height=height, **kwargs)

    def _panel(self, field: str, title: str, color: str, **kwargs: Any) -> figure:
        x_range = DataRange1d(start=0) if field == "share" else Range1d(0, 1)
        root = plot(title, x_range=x_range, y_range=self.places, **kwargs)
        root.hbar(
            y="place",
            right=field,
            height=0.8,
            color=color,
            source=self.source,
            nonselection_alpha=1.0,
        )
        root.xaxis.formatter = NumeralTickFormatter(format="0.[0]%")
        if field == "share":
            root.xaxis.ticker = BasicTicker(desired_num_ticks=4, num_minor_ticks=0)
        else:
            root.xaxis.ticker = FixedTicker(ticks=[0, 0.5, 1])
        root.min_border_right = 24
        root.yaxis.ticker = self.ticker
        root.ygrid.visible = False
        hover(
            root,
            ("worker", "@worker"),
            ("device", "@device"),
            ("state", "@state"),
            ("busy with batches", "@busy{0 %}"),
            ("device utilization", "@utilization"),
            ("memory", "@memory_told"),
            ("share of rows", "@share{0 %}"),
            ("free in", "@queue"),
        )
        link = OpenURL(url="./info/worker/@escaped.html")
        root.add_tools(TapTool(callback=link))
        return root

    def show(self) -> None:
        """Show what the feed has read last."""
        name = self.selector.name
        rows = sorted(self.feed.workers(name), key=lambda row: row.status.address)
        busy, shares = self.feed.busy(), self.feed.shares(name)
        count = len(rows)
        columns: dict[str, list[Any]] = {
            # The first worker on top.
            "place": list(range(count - 1, -1, -1)),
            "worker": [row.label for row in rows],
            "escaped": [url_escape(row.status.address) for row in rows],
            "device": [row.status.device or "–" for row in rows],
            "state": [row.status.state for row in rows],
            "busy": [_number(busy.get(row.status.address)) for row in rows],
            "memory": [memory_share(row) for row in rows],
            "share": [shares.get(row.status.address, 0.0) for row in rows],
            "busy_color": [_color(row, BLUE) for row in rows],
            "memory_color": [_color(row, ORANGE) for row in rows],
            "share_color": [_color(row, GREEN) for row in rows],
            "memory_told": [f"{wording.memory(row)} ({row.memory_of})" for row in rows],
            "utilization": [wording.percent(row.utilization) for row in rows],
            "queue": [wording.seconds(row.status.load) for row in rows],
        }
        update(self.source, columns)
        self.places.end = max(count, 1) - 0.5
        self._label(columns["worker"])

    def _label(self, workers: list[str]) -> None:
        shown = workers if len(workers) <= _LABELLED else []
        labels = {len(workers) - 1 - i: worker for i, worker in enumerate(shown)}
        axis = self.first.yaxis[0]
        if axis.major_label_overrides != labels:
            axis.major_label_overrides = labels
            self.ticker.ticks = sorted(labels)


def memory_share(row: WorkerRow) -> float:
    """How full a worker's memory is; not a number without a limit."""
    return row.memory / row.memory_limit if row.memory_limit else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _color(row: WorkerRow, color: str) -> str:
    if row.status.healthy:
        return color
    return RED if row.status.state in ("ready", "failed") else GREY
