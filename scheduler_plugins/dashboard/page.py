"""The page, and the pages of its parts."""

from __future__ import annotations

from typing import Any

from bokeh.core.properties import validate
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import Div
from distributed.dashboard.components import DashboardComponent, add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from scheduler_plugins.dashboard.caches import Caches
from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.deployments import Deployments
from scheduler_plugins.dashboard.feed import Feed
from scheduler_plugins.dashboard.health import Health
from scheduler_plugins.dashboard.history import INTERVAL
from scheduler_plugins.dashboard.load import Load
from scheduler_plugins.dashboard.selector import Selector
from scheduler_plugins.dashboard.summary import NOTHING, Summary
from scheduler_plugins.dashboard.throughput import Throughput
from scheduler_plugins.dashboard.traffic import BatchSizes, Latencies, Queue, Requests
from scheduler_plugins.dashboard.versions import Versions

__all__ = ["PARTS", "Page", "page_doc", "part_doc"]

#: What has a page of its own.
PARTS: tuple[type[Component], ...] = (
    Deployments,
    Requests,
    Queue,
    Latencies,
    BatchSizes,
    Throughput,
    Load,
    Health,
    Caches,
    Versions,
)

_ROW_HEIGHT = 22
_HEADER_HEIGHT = 34


class Page(DashboardComponent):
    """Everything about one deployment, below the list of all.

    Parameters
    ----------
    feed
        What is shown.
    wanted
        The deployment to begin with.
    part
        Show this part alone.
    """

    def __init__(
        self,
        feed: Feed,
        wanted: str | None = None,
        part: type[Component] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.feed = feed
        self.selector = Selector(feed, wanted)
        self.parts: list[Component] = []
        self.deployments: Any = None
        self.nothing = Div(text=NOTHING, name="nothing")
        self.content = self._whole() if part is None else self._alone(part)
        self.content.name = "everything"
        self.root: Any = column(self.nothing, sizing_mode="stretch_both")

    def __repr__(self) -> str:
        return f"<Page of {self.selector.name!r}>"

    def _add(self, kind: type[Component], **kwargs: Any) -> Any:
        part = kind(self.feed, self.selector, **kwargs)
        self.parts.append(part)
        return part.root

    def _alone(self, kind: type[Component]) -> Any:
        root = self._add(kind, sizing_mode="stretch_both")
        above = [] if kind is Deployments else [self.selector.root]
        return column(*above, root, sizing_mode="stretch_both")

    def _whole(self) -> Any:
        wide: dict[str, Any] = {"sizing_mode": "stretch_width"}
        self.deployments = self._add(Deployments, height=80, **wide)
        plots = [
            self._add(kind, height=195, **wide)
            for kind in (Requests, Queue, Latencies, BatchSizes, Throughput)
        ]
        return column(
            row(self.selector.root, self._add(Summary, **wide), **wide),
            self.deployments,
            row(plots, **wide),
            row(
                self._add(Load, height=205, **wide),
                column(
                    self._add(Versions, height=85, width=520),
                    self._add(Caches, height=120, width=520),
                ),
                **wide,
            ),
            self._add(Health, height=150, **wide),
            **wide,
        )

    def update(self, messages: object = None) -> None:
        """Read what is new, and show it."""
        self.feed.look()
        self.selector.update()
        if self.feed.rows:
            self._fit()
            for part in self.parts:
                part.show()
        # Tables that are drawn before they are seen do not know how wide they are.
        shown = self.content if self.feed.rows else self.nothing
        if self.root.children != [shown]:
            # Dask has nothing validated in what it calls periodically, and without
            # that Bokeh sends the name of a column of colours as if it was a colour.
            with validate(True):
                self.root.children = [shown]

    def _fit(self) -> None:
        """Give the list of deployments the height that it needs, up to a limit."""
        rows = min(max(len(self.feed.rows), 1), 4)
        height = _HEADER_HEIGHT + rows * _ROW_HEIGHT
        if self.deployments is not None and self.deployments.height != height:
            self.deployments.height = height


def page_doc(feed: Feed, scheduler: Any, extra: dict[str, Any], doc: Document) -> None:
    """Show the whole page in a document that somebody has opened."""
    _show(Page(feed, _wanted(doc)), doc)
    doc.title = "Dask: Inference"
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)


def part_doc(
    part: type[Component],
    feed: Feed,
    scheduler: Any,
    extra: dict[str, Any],
    doc: Document,
) -> None:
    """Show one part."""
    _show(Page(feed, _wanted(doc), part), doc)
    doc.title = f"Dask: Inference {part.title}"


def _show(page: Page, doc: Document) -> None:
    page.update()
    add_periodic_callback(doc, page, round(1e3 * INTERVAL))
    doc.add_root(page.root)
    doc.theme = BOKEH_THEME


def _wanted(doc: Document) -> str | None:
    """The deployment that the address asks for: ``?deployment=NAME``."""
    context = doc.session_context
    if context is None or context.request is None:
        return None
    asked = context.request.arguments.get("deployment", [])
    return asked[0].decode(errors="replace") if asked else None
