"""What the parts of a page have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from bokeh.models import ColumnDataSource
from distributed.dashboard.components import DashboardComponent

from scheduler_plugins.dashboard.feed import Feed
from scheduler_plugins.dashboard.selector import Selector

__all__ = ["Component"]


class Component(DashboardComponent):
    """A plot or a table of one deployment, or of all.

    Parameters
    ----------
    feed
        What is shown.
    selector
        Tells of which deployment.
    **kwargs
        For the Bokeh model that is its root.
    """

    #: Its own page is ``/individual-inference-<name>``; so its source is called.
    name: ClassVar[str]
    #: What it shows, in a few words.
    title: ClassVar[str]

    source: ColumnDataSource
    root: Any

    def __init__(self, feed: Feed, selector: Selector, **kwargs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.feed = feed
        self.selector = selector
        self.build(**kwargs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def build(self, **kwargs: Any) -> None:
        """Make the source and the root."""
        raise NotImplementedError

    def show(self) -> None:
        """Show what the feed has read last."""
        raise NotImplementedError

    def update(self, messages: object = None) -> None:
        """As :meth:`show`; so Dask calls it."""
        self.show()

    def empty(self, *names: str) -> ColumnDataSource:
        """A source with these columns and no rows."""
        return ColumnDataSource({name: [] for name in names}, name=self.name)
