"""The learned throughput by batch size."""

from __future__ import annotations

from typing import Any

from bokeh.models import LogTicker, NumeralTickFormatter, Range1d
from distributed.dashboard.utils import update

from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    compact_legend,
    hover,
    plot,
)

__all__ = ["Throughput"]

_NOTHING = "No batch size is measured so far"
_COLORS = (BLUE, GREEN, ORANGE)


class Throughput(Component):
    """Rows per second of one device by batch size, and the size that is best.

    One line for each class of device that serves the active version.
    """

    name = "throughput"
    title = "Learned rows/s by batch size"

    def build(self, **kwargs: Any) -> None:
        """Make the plot."""
        self.source = self.empty(
            "rows", "rate", "milliseconds", "measurements", "device", "color", "best"
        )
        self.curves = self.empty("rows", "rates", "device", "color")
        self.curves.name = "throughput-curves"
        self.best = self.empty("rows", "rate")
        self.best.name = "best-size"
        self.sizes = Range1d(0.9, 70)
        self.root = plot(
            self.title,
            name="throughput-plot",
            x_axis_type="log",
            x_range=self.sizes,
            **kwargs,
        )
        self.root.xaxis.ticker = LogTicker(base=2, desired_num_ticks=8)
        self.root.xaxis[0].formatter = NumeralTickFormatter(format="0")
        self.root.yaxis[0].formatter = NumeralTickFormatter(format="0,0")
        self.root.multi_line(
            "rows",
            "rates",
            source=self.curves,
            color="color",
            line_width=2,
            legend_field="device",
        )
        points = self.root.scatter(
            "rows", "rate", source=self.source, color="color", size=6
        )
        self.root.scatter(
            "rows",
            "rate",
            source=self.best,
            size=14,
            marker="star",
            color=PURPLE,
            legend_label="learned best",
        )
        compact_legend(self.root, "bottom_right")
        self.root.legend.orientation = "vertical"
        hover(
            self.root,
            ("device", "@device"),
            ("batch size", "@rows rows"),
            ("throughput", "@rate{0,0} rows/s"),
            ("time", "@milliseconds{0,0.00} ms"),
            ("measured", "@measurements{0,0} times"),
            renderers=[points],
        )

    def show(self) -> None:
        """Show what the feed has read last."""
        points: dict[str, list[Any]] = {name: [] for name in self.source.data}
        curves: dict[str, list[Any]] = {name: [] for name in self.curves.data}
        best: dict[str, list[Any]] = {"rows": [], "rate": []}
        status = self.feed.status(self.selector.name)
        found = None if status is None else status.version(status.active_version)
        for number, kind in enumerate(sorted(found.latency) if found else ()):
            assert found is not None
            color = _COLORS[number % len(_COLORS)]
            measured = [row for row in found.latency[kind] if row[0] and row[1]]
            for rows, seconds, count in measured:
                is_best = rows == _nearest(measured, found.best_batch_size[kind])
                cells = (
                    *(rows, rows / seconds, 1e3 * seconds),
                    *(count, kind, color, is_best),
                )
                for name, cell in zip(points, cells, strict=True):
                    points[name].append(cell)
                if is_best:
                    best["rows"].append(rows)
                    best["rate"].append(rows / seconds)
            if measured:
                curves["rows"].append([rows for rows, _, _ in measured])
                curves["rates"].append([rows / s for rows, s, _ in measured])
                curves["device"].append(kind)
                curves["color"].append(color)
        self.root.title.text = self.title if points["rows"] else _NOTHING
        self.sizes.end = 1.1 * max([2, *points["rows"]])
        update(self.source, points)
        update(self.curves, curves)
        update(self.best, best)


def _nearest(measured: list[tuple[int, float, int]], size: int) -> int:
    """The measured size that stands for another: means are no whole sizes."""
    return min((rows for rows, _, _ in measured), key=lambda rows: abs(rows - size))
