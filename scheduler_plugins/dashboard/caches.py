"""How often results were found in a cache."""

from __future__ import annotations

from typing import Any

from bokeh.models import FactorRange, NumeralTickFormatter, Range1d
from dask.utils import format_bytes
from distributed.dashboard.utils import update

from daskinfer.cache.totals import CacheStatus
from scheduler_plugins.dashboard import wording
from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.style import GREEN, hover, plot

__all__ = ["Caches"]

_NONE = "No cache: deploy(..., cache=CachePolicy())"


class Caches(Component):
    """Hits per look-up that reached a tier, for each tier, over all workers."""

    name = "cache"
    title = "Cache hits per tier"

    def build(self, **kwargs: Any) -> None:
        """Make the plot."""
        self.source = self.empty(
            "tier", "rate", "told", "hits", "misses", "entries", "bytes"
        )
        self.tiers = FactorRange()
        self.root = plot(
            self.title,
            name="cache-plot",
            x_range=Range1d(0, 1),
            y_range=self.tiers,
            **kwargs,
        )
        self.root.hbar(
            y="tier", right="rate", height=0.7, color=GREEN, source=self.source
        )
        self.root.text(
            x=0.02,
            y="tier",
            text="told",
            source=self.source,
            text_font_size="8pt",
            text_baseline="middle",
        )
        self.root.xaxis.formatter = NumeralTickFormatter(format="0%")
        self.root.ygrid.visible = False
        hover(
            self.root,
            ("tier", "@tier"),
            ("hits", "@hits{0,0}"),
            ("misses", "@misses{0,0}"),
            ("entries", "@entries{0,0}"),
            ("bytes", "@bytes"),
        )

    def show(self) -> None:
        """Show what the workers have told last."""
        found = self.feed.cache(self.selector.name)
        tiers = [] if found is None else list(reversed(found.results.tiers))
        if list(self.tiers.factors) != [tier.name for tier in tiers]:
            self.tiers.factors = [tier.name for tier in tiers]
        update(
            self.source,
            {
                "tier": [tier.name for tier in tiers],
                "rate": [tier.hit_rate or 0.0 for tier in tiers],
                "told": [
                    f"{wording.percent(tier.hit_rate)} of "
                    f"{wording.count(tier.hits + tier.misses)}"
                    for tier in tiers
                ],
                "hits": [tier.hits for tier in tiers],
                "misses": [tier.misses for tier in tiers],
                "entries": [tier.entries for tier in tiers],
                "bytes": [
                    f"{format_bytes(tier.nbytes)} of {format_bytes(tier.budget)}"
                    for tier in tiers
                ],
            },
        )
        self.root.title.text = _NONE if found is None else _headline(found)


def _headline(found: CacheStatus) -> str:
    results = found.results
    lookups = results.hits + results.misses
    told = f"Cache: {wording.percent(results.hit_rate)} hits of {lookups:,} look-ups"
    return told + (f", {found.resting} workers rest" if found.resting else "")
