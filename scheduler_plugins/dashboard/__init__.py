"""The page ``/inference`` of Dask's dashboard.

What is shown is taken from the plugin by :mod:`~scheduler_plugins.dashboard.view`, and
remembered by :mod:`~scheduler_plugins.dashboard.feed` while somebody looks. Neither
needs Bokeh; the plots do, one module each.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from daskinfer.logs import Log

if TYPE_CHECKING:
    from scheduler_plugins.dashboard.feed import Feed
    from scheduler_plugins.inference import InferencePlugin

__all__ = ["install"]

logger = Log("dashboard")


def install(plugin: InferencePlugin) -> Feed | None:
    """Add the page to the dashboard of a plugin's scheduler.

    Returns
    -------
    Feed or None
        What the page shows, to be closed with the plugin; None where the scheduler
        has no dashboard, because Bokeh is missing or it was told so.
    """
    if not plugin.scheduler.http_application.applications:
        return None
    if importlib.util.find_spec("bokeh") is None:
        return None
    try:
        from scheduler_plugins.dashboard.installing import add_pages

        return add_pages(plugin)
    except Exception:
        # Models are served without it all the same. How Dask puts its own pages
        # together is its internal affair, and may change.
        logger.exception("The dashboard could not be given its page of inference")
        return None
