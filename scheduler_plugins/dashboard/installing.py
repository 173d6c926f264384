"""Adds the pages to the dashboard that a scheduler has."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from bokeh.server.tornado import BokehTornado
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop

from scheduler_plugins.dashboard.feed import Feed
from scheduler_plugins.dashboard.page import PARTS, page_doc, part_doc

if TYPE_CHECKING:
    from scheduler_plugins.inference import InferencePlugin

__all__ = ["PAGE", "add_pages"]

#: The name of the page: its path, and its link in the navigation bar.
PAGE = "inference"


def add_pages(plugin: InferencePlugin) -> Feed | None:
    """Add the pages, and links to them; None if there is no dashboard.

    Dask stops what serves them with the scheduler.
    """
    scheduler = plugin.scheduler
    applications = scheduler.http_application.applications
    own = [app for app in applications if isinstance(app, BokehTornado)]
    if not own:
        return None
    feed = Feed(plugin)
    # As Dask's own dashboard does it; its list of links is the one that is rendered,
    # for every page.
    links = template_variables(scheduler)
    application = BokehApplication(
        _pages(feed), scheduler, prefix=own[0].prefix, template_variables=links
    )
    scheduler.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()
    _link(links)
    return feed


def _pages(feed: Feed) -> dict[str, Any]:
    return {f"/{PAGE}": partial(page_doc, feed)} | {
        f"/{_path(part.name)}": partial(part_doc, part, feed) for part in PARTS
    }


def _path(part: str) -> str:
    return f"individual-{PAGE}-{part}"


def _link(links: dict[str, Any]) -> None:
    """Add links to those that Dask's pages show."""
    if PAGE not in links["pages"]:
        links["pages"].append(PAGE)
    known = {plot["url"] for plot in links["plots"]}
    for part in PARTS:
        if _path(part.name) not in known:
            name = f"Inference {part.name.replace('-', ' ')}".title()
            links["plots"].append({"url": _path(part.name), "name": name})
    links["plots"].sort(key=lambda plot: plot["name"])
