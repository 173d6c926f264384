"""The learned throughput by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from daskinfer.timing.curve import Curve

__all__ = ["Throughput", "along"]

_NOTHING = "No batch size is measured so far"
_COLORS = (BLUE, GREEN, ORANGE)
#: Pieces in which a curve is drawn, besides those between its own points.
_STEPS = 16


class Throughput(Component):
    """Rows per second of one device by batch size, and the size that is best.

    One line for each class of device that serves the active version: what the engine
    goes by, with the best size on it. The points are the measurements that it was
    learned from, of which single ones may be off.
    """

    name = "throughput"
    title = "Learned rows/s by batch size"

    def build(self, **kwargs: Any) -> None:
        """Make the plot."""
        self.source = self.empty(
            "rows", "rate", "milliseconds", "measurements", "device", "color"
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
                cells = rows, rows / seconds, 1e3 * seconds, count, kind, color
                for name, cell in zip(points, cells, strict=True):
                    points[name].append(cell)
            curve = self.feed.learned(self.selector.name, kind) if measured else None
            if curve is not None:
                size = found.best_batch_size[kind]
                sizes = along(curve, size)
                curves["rows"].append(sizes)
                curves["rates"].append([rows / curve.at(rows) for rows in sizes])
                curves["device"].append(kind)
                curves["color"].append(color)
                best["rows"].append(size)
                best["rate"].append(size / curve.at(size))
        self.root.title.text = self.title if points["rows"] else _NOTHING
        self.sizes.end = 1.1 * max([2, *points["rows"]])
        update(self.source, points)
        update(self.curves, curves)
        update(self.best, best)


def along(curve: Curve, size: int) -> list[float]:
    """Batch sizes at which to draw a curve: where it bends, between, and at one size.

    It is straight in seconds, and so is not in rows per second.

    Examples
    --------
    >>> from daskinfer.timing.curve import Curve
    >>> sizes = along(Curve([1, 16], [0.010, 0.025]), 12)
    >>> sizes[0], sizes[-1], 12 in sizes, len(sizes)
    (1, 16, True, 18)
    """
    first, last = min(curve.rows[0], size), max(curve.rows[-1], size)
    between = (first * (last / first) ** (i / _STEPS) for i in range(1, _STEPS))
    return sorted({*curve.rows, *between, size})
