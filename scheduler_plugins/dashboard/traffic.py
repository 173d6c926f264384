"""What comes, what waits and how long it takes, over time."""

from __future__ import annotations

from typing import Any

from bokeh.models import DataRange1d, LinearAxis

from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    compact_legend,
    hover,
    time_plot,
)

__all__ = ["BatchSizes", "Latencies", "OverTime", "Queue", "Requests"]


class OverTime(Component):
    """Lines over the time that is remembered; those who derive say which."""

    #: Columns of a history, each with what it is called and its colour.
    lines: tuple[tuple[str, str, str], ...]
    #: What is multiplied with the column.
    scale = 1.0
    #: How values are written, after numeral.js.
    form = "0,0.0"

    def build(self, **kwargs: Any) -> None:
        """Make the plot."""
        columns = [column for column, _, _ in self.lines]
        self.source = self.empty("at", *columns)
        self.root = time_plot(self.title, name=f"{self.name}-plot", **kwargs)
        for column, label, color in self.lines:
            self.draw(column, label, color)
        compact_legend(self.root)
        hover(
            self.root,
            *((label, f"@{column}{{{self.form}}}") for column, label, _ in self.lines),
            mode="vline",
            renderers=self.root.renderers[:1],
        )

    def draw(self, column: str, label: str, color: str) -> None:
        """Add one line."""
        self.root.line(
            "at",
            column,
            source=self.source,
            color=color,
            line_width=2,
            legend_label=label,
        )

    def show(self) -> None:
        """Show what the feed has read last."""
        history = self.feed.history(self.selector.name)
        columns = {
            column: [self.scale * value for value in history[column]]
            for column, _, _ in self.lines
        }
        self.source.data = {"at": history["at"], **columns}


class Requests(OverTime):
    """Requests per second: what arrived, and how it ended."""

    name = "requests"
    title = "Requests per second"
    lines = (
        ("arrived", "arrived", ORANGE),
        ("answered", "answered", GREEN),
        ("failed", "failed", RED),
    )


class Latencies(OverTime):
    """Percentiles of the time from arrival to answer."""

    name = "latency"
    title = "Latency [ms]"
    scale = 1e3
    lines = (("p50", "p50", GREEN), ("p95", "p95", ORANGE), ("p99", "p99", RED))


class BatchSizes(OverTime):
    """Rows per forward pass, against the size that has turned out best."""

    name = "batch-size"
    title = "Batch size [rows]"
    lines = (("batch_size", "mean", BLUE), ("best_size", "learned best", PURPLE))

    def draw(self, column: str, label: str, color: str) -> None:
        """Add one line; the best size moves in steps."""
        if column != "best_size":
            super().draw(column, label, color)
            return
        self.root.step(
            "at",
            column,
            source=self.source,
            color=color,
            mode="after",
            line_width=2,
            line_dash="dashed",
            legend_label=label,
        )


class Queue(OverTime):
    """How many wait, on the left; for how long the next one has, on the right."""

    name = "queue"
    title = "Queue"
    form = "0,0.00"
    lines = (("waiting", "requests", BLUE), ("oldest", "oldest wait [s]", RED))

    def draw(self, column: str, label: str, color: str) -> None:
        """Add one line, on its own axis."""
        if column != "oldest":
            super().draw(column, label, color)
            return
        self.root.extra_y_ranges = {
            "seconds": DataRange1d(start=0, range_padding=0.1, min_interval=0.1)
        }
        axis = LinearAxis(y_range_name="seconds", minor_tick_line_color=None)
        axis.major_label_text_font_size = "8pt"
        self.root.add_layout(axis, "right")
        line = self.root.line(
            "at",
            column,
            source=self.source,
            color=color,
            line_width=2,
            legend_label=label,
            y_range_name="seconds",
        )
        self.root.y_range.renderers = [self.root.renderers[0]]
        self.root.extra_y_ranges["seconds"].renderers = [line]
