"""What plots and tables look like."""

from __future__ import annotations

from typing import Any

from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    DataRange1d,
    DataTable,
    FixedTicker,
    HoverTool,
    HTMLTemplateFormatter,
    InlineStyleSheet,
    NumberFormatter,
    NumeralTickFormatter,
    Range1d,
    TableColumn,
)
from bokeh.plotting import figure

from scheduler_plugins.dashboard.history import SPAN

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "ORANGE",
    "PURPLE",
    "RED",
    "compact_legend",
    "hover",
    "long_text",
    "number",
    "plot",
    "state",
    "table",
    "text",
    "time_plot",
]

# Told apart by those who see few colours too (Okabe and Ito, "Color Universal
# Design", 2008).
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"

_FONT = "8pt"
_UNKNOWN = "–"
# Tables lie beneath Dask's menus; and beside plots, a row needs little height.
_TABLE = """
.bk-data-table { z-index: 0; font-size: 12px; }
.slick-header-column { font-size: 12px; }
"""


def plot(title: str, **kwargs: Any) -> figure:
    """A plot without a toolbar, its vertical axis from zero unless told otherwise."""
    kwargs.setdefault("y_range", DataRange1d(start=0, range_padding=0.1))
    root = figure(title=title, tools="", toolbar_location=None, **kwargs)
    root.title.text_font_size = "10pt"
    root.min_border_right = 16
    for axis in root.axis:
        axis.major_label_text_font_size = _FONT
        axis.axis_label_text_font_size = _FONT
        axis.minor_tick_line_color = None
    root.grid.grid_line_alpha = 0.5
    return root


def time_plot(title: str, **kwargs: Any) -> figure:
    """A plot over the time that a history remembers."""
    root = plot(title, x_range=Range1d(-SPAN, 0), **kwargs)
    root.yaxis.formatter = NumeralTickFormatter(format="0.[00]a")
    ticks = [-120, -90, -60, -30, 0]
    root.xaxis.ticker = FixedTicker(ticks=ticks)
    root.xaxis.major_label_overrides = {tick: f"{tick} s" for tick in ticks} | {
        0: "now"
    }
    return root


def hover(root: figure, *tooltips: tuple[str, str], **kwargs: Any) -> None:
    """Tell values where the mouse is; Bokeh escapes them."""
    root.add_tools(HoverTool(tooltips=list(tooltips), **kwargs))


def compact_legend(root: figure, location: str = "top_left") -> None:
    """A legend that leaves room for the plot."""
    legend = root.legend
    legend.location = location
    legend.orientation = "horizontal"
    legend.label_text_font_size = _FONT
    legend.glyph_height = legend.glyph_width = 12
    legend.padding = legend.margin = 2
    legend.spacing = 4
    legend.label_standoff = 2
    legend.border_line_color = None
    legend.background_fill_alpha = 0.7


def table(
    source: ColumnDataSource, columns: list[TableColumn], **kwargs: Any
) -> DataTable:
    """A table that fills its width, and scrolls."""
    kwargs.setdefault("row_height", 22)
    root = DataTable(
        source=source,
        columns=columns,
        index_position=None,
        reorderable=False,
        stylesheets=[InlineStyleSheet(css=_TABLE)],
        **kwargs,
    )
    # With Bokeh 3.9, a table looks at its source only when its view has changed, which
    # new values in as many rows do not do.
    tell = CustomJS(args={"view": root.view}, code="view.change.emit()")
    source.js_on_change("data", tell)
    return root


# Underscore's <%- escapes, as no column of plain text needs; colours are the page's.


def text(name: str, title: str, width: int) -> TableColumn:
    """A column of text, which is escaped."""
    return TableColumn(field=name, title=title, width=width)


def long_text(name: str, title: str, width: int) -> TableColumn:
    """A column of text that is told in full where the mouse is."""
    template = '<span title="<%- value %>"><%- value %></span>'
    formatter = HTMLTemplateFormatter(template=template)
    return TableColumn(field=name, title=title, width=width, formatter=formatter)


def state(name: str, title: str, width: int) -> TableColumn:
    """A column of words, in the colours of the column ``<name>_color``."""
    template = f'<span style="color:<%= {name}_color %>"><%- value %></span>'
    formatter = HTMLTemplateFormatter(template=template)
    return TableColumn(field=name, title=title, width=width, formatter=formatter)


def number(name: str, title: str, width: int, form: str = "0,0") -> TableColumn:
    """A column of numbers; what is unknown is a dash."""
    formatter = NumberFormatter(
        format=form, text_align="right", nan_format=_UNKNOWN, null_format=_UNKNOWN
    )
    return TableColumn(field=name, title=title, width=width, formatter=formatter)
