"""What the pages show, read while somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.metrics import monotonic

from daskinfer.status import DeploymentStatus
from scheduler_plugins.dashboard import view
from scheduler_plugins.dashboard.cache_watch import CacheWatch
from scheduler_plugins.dashboard.history import INTERVAL, History, Rate
from scheduler_plugins.dashboard.view import DeploymentRow, WorkerRow
from scheduler_plugins.elasticity import Target
from scheduler_plugins.occupation import busy_seconds

if TYPE_CHECKING:
    from daskinfer.cache.totals import CacheStatus
    from daskinfer.timing.curve import Curve
    from scheduler_plugins.inference import InferencePlugin


class Feed:
    """Reads the plugin's state for all pages that are open, at most twice a second.

    Nothing is read, and nothing remembered, while nobody calls :meth:`look`.

    Parameters
    ----------
    plugin
        Whose state is shown.
    clock
        Tells the monotonic time in seconds.

    Attributes
    ----------
    rows
        The deployments, as they were read last.
    target
        How many workers are wanted, and why.
    at
        When all that was.
    """

    def __init__(
        self, plugin: InferencePlugin, clock: Callable[[], float] = monotonic
    ) -> None:
        self.plugin = plugin
        self.rows: dict[str, DeploymentRow] = {}
        self.at = float("-inf")
        self.target = Target(0, "")
        self._clock = clock
        self._histories: dict[str, History] = {}
        self._busy = Rate(int(10 / INTERVAL) + 1)
        self._statuses: dict[str, DeploymentStatus | None] = {}
        self._workers: dict[str, list[WorkerRow]] = {}
        self._caches = CacheWatch(plugin, clock)

    def __repr__(self) -> str:
        return f"<Feed of {self.plugin!r}>"

    def look(self) -> None:
        """Read anew what is older than an interval."""
        now = self._clock()
        # Several pages are open, and timers are not exact.
        if now - self.at < 0.8 * INTERVAL:
            return
        self.at = now
        self.rows = {row.name: row for row in view.deployments(self.plugin, now)}
        self.plugin.scaling.wanted()
        self.target = self.plugin.scaling.target
        self._statuses.clear()
        self._workers.clear()
        self._histories = {
            name: self._histories.get(name, History()) for name in self.rows
        }
        for name, history in self._histories.items():
            history.add(now, self.rows[name])
        self._busy.add(now, busy_seconds(self.plugin, now))

    def status(self, name: str) -> DeploymentStatus | None:
        """The status of a deployment; None if there is none of this name."""
        if name not in self._statuses:
            self._statuses[name] = view.status(self.plugin, name)
        return self._statuses[name]

    def learned(self, name: str, device_class: str) -> Curve | None:
        """What batches of its active version take on a class of devices."""
        return view.learned(self.plugin, name, device_class)

    def workers(self, name: str) -> list[WorkerRow]:
        """Its workers, those that need attention first."""
        if name not in self._workers:
            found = self.status(name)
            rows = [] if found is None else view.workers(self.plugin, found)
            self._workers[name] = rows
        return self._workers[name]

    def history(self, name: str) -> dict[str, list[float]]:
        """How its figures have moved; see :meth:`History.columns`."""
        return self._histories.get(name, History()).columns(self.at)

    def shares(self, name: str) -> dict[str, float]:
        """The part of its latest rows that each worker ran."""
        history = self._histories.get(name)
        return {} if history is None else history.shares()

    def busy(self) -> dict[str, float]:
        """The part of the last seconds that each worker ran batches of anybody."""
        return {a: min(value, 1.0) for a, value in self._busy.per_second().items()}

    def cache(self, name: str) -> CacheStatus | None:
        """What the workers told last of its cache; None before, or without one."""
        return self._caches.of(name)

    def close(self) -> None:
        """Ask nobody any more."""
        self._caches.close()
