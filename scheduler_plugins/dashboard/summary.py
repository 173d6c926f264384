"""The most telling figures of a deployment, and what to do where there are none."""

from __future__ import annotations

from html import escape
from typing import Any

from bokeh.models import Div

from scheduler_plugins.dashboard import wording
from scheduler_plugins.dashboard.component import Component
from scheduler_plugins.dashboard.style import RED
from scheduler_plugins.dashboard.view import DeploymentRow
from scheduler_plugins.elasticity import Target

__all__ = ["NOTHING", "Summary", "html"]

#: What is shown while nothing is deployed.
NOTHING = """\
<div style="font-size:16px; padding:24px; line-height:1.6">
Nothing is deployed. From Python, with this scheduler's address:
<pre style="background:#eee; padding:12px">
import daskinfer
from distributed import Client

client = Client("tcp://...")
model = daskinfer.deploy(client, net)</pre>
It shows here a moment later.
</div>"""

_TILE = (
    '<div style="padding:0 14px 0 0" title="{}">'
    '<div style="color:#666; font-size:11px">{}</div>'
    '<div style="font-size:19px; white-space:nowrap; color:{}">{}</div></div>'
)
_NOTE = '<div style="color:{}; font-size:12px; white-space:normal">{}</div>'


class Summary(Component):
    """Some figures of the deployment that is chosen."""

    name = "summary"
    title = "Summary"

    def build(self, **kwargs: Any) -> None:
        """Make the text."""
        self.source = self.empty()
        self.root = Div(name="summary-text", disable_math=True, **kwargs)

    def show(self) -> None:
        """Show what the feed has read last."""
        row = self.feed.rows.get(self.selector.name)
        found = self.feed.cache(self.selector.name)
        hits = None if found is None else found.results.hit_rate
        target = self.feed.target
        self.root.text = "" if row is None else html(row, hits, target)


def html(
    row: DeploymentRow, hit_rate: float | None, target: Target | None = None
) -> str:
    """The figures as HTML; all text that users give is escaped.

    >>> row = DeploymentRow("m", "<b>", "ready", problem="no worker for <b>")
    >>> "<b>" in html(row, None)
    False
    """
    latency = row.latency
    waiting = wording.count(row.waiting + row.delayed)
    percentiles = (latency.p50, latency.p95, latency.p99)
    tiles = [
        (f"version {row.version}", row.state, not row.is_served),
        ("workers ready", wording.ready(row), row.ready - row.unfit < row.workers),
        ("answers/s", wording.rate(row.throughput), False),
        ("waiting / oldest", f"{waiting} / {wording.seconds(row.oldest)}", False),
        ("running", wording.count(row.in_flight), False),
        (
            "latency p50 / p95 / p99",
            " / ".join(wording.seconds(value) for value in percentiles),
            False,
        ),
        ("requests", wording.count(row.requests), False),
        (
            "failed / cancelled",
            f"{wording.count(row.failures)} / {wording.count(row.cancelled)}",
            row.failures > 0,
        ),
        (
            "retries / held back",
            f"{wording.count(row.retries)} / {wording.count(row.delayed)}",
            row.delayed > 0,
        ),
        ("cache hits", wording.percent(hit_rate), False),
    ]
    reasons = {}
    if target is not None:
        tiles.append(("workers wanted", wording.count(target.workers), False))
        reasons["workers wanted"] = target.reason
    told = "".join(
        _TILE.format(
            escape(reasons.get(label, "")),
            escape(label),
            RED if is_bad else "#222",
            escape(value),
        )
        for label, value, is_bad in tiles
    )
    note = ""
    if row.problem is not None:
        note = _NOTE.format(RED, escape(row.problem))
    elif row.failed_by:
        kinds = (f"{wording.count(n)} {kind}" for kind, n in row.failed_by.items())
        note = _NOTE.format("#666", escape(f"failed: {', '.join(kinds)}"))
    elif not row.requests:
        note = _NOTE.format("#666", "No request so far: model.submit(x).result()")
    return f'<div style="display:flex; flex-wrap:wrap">{told}</div>{note}'
