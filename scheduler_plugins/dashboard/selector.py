"""Which deployment a page is about."""

from __future__ import annotations

from bokeh.models import Select

from scheduler_plugins.dashboard.feed import Feed

__all__ = ["Selector"]


class Selector:
    """A list of the deployments to choose from.

    Parameters
    ----------
    feed
        Knows what is deployed.
    wanted
        The one to begin with, if it is there.

    Attributes
    ----------
    root
        The Bokeh model.
    """

    def __init__(self, feed: Feed, wanted: str | None = None) -> None:
        self._feed = feed
        self._wanted = wanted
        self.root = Select(name="deployment", options=[], value="", width=190)

    def __repr__(self) -> str:
        return f"<Selector {self.name!r}>"

    @property
    def name(self) -> str:
        """What is chosen; empty if nothing is deployed."""
        return str(self.root.value or "")

    def update(self) -> None:
        """Offer what is deployed by now; what is gone is not chosen any more."""
        names = list(self._feed.rows)
        if self.root.options != names:
            self.root.options = names
        if self.name not in names:
            first = names[0] if names else ""
            self.root.value = self._wanted if self._wanted in names else first
