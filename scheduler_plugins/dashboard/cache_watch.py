"""What the workers tell of their caches, asked while somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from daskinfer.logs import Log
from scheduler_plugins.cache_calls import cache_status

if TYPE_CHECKING:
    from daskinfer.cache.totals import CacheStatus
    from scheduler_plugins.deployment import Deployment
    from scheduler_plugins.inference import InferencePlugin

logger = Log("dashboard")

#: Seconds between two questions.
_EVERY = 2.0


class CacheWatch:
    """Asks the workers in the background, one question at a time.

    Parameters
    ----------
    plugin
        Whose deployments and workers are asked about.
    clock
        Tells the monotonic time in seconds.
    """

    def __init__(self, plugin: InferencePlugin, clock: Callable[[], float]) -> None:
        self._plugin = plugin
        self._clock = clock
        self._told: dict[str, CacheStatus | None] = {}
        self._asked: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<CacheWatch of {sorted(self._told)}>"

    def of(self, name: str) -> CacheStatus | None:
        """What was told last; asks anew if that was a while ago."""
        deployment = self._plugin.registry.deployments.get(name)
        if deployment is None or deployment.cache is None:
            self._told.pop(name, None)
            self._asked.pop(name, None)
            return None
        due = self._asked.get(name, float("-inf")) + _EVERY
        is_due = self._clock() >= due and not self._is_closed
        if is_due and name not in self._tasks:
            self._asked[name] = self._clock()
            task = asyncio.get_running_loop().create_task(self._ask(deployment))
            self._tasks[name] = task
            task.add_done_callback(lambda task: self._tasks.pop(name, None))
        return self._told.get(name)

    async def _ask(self, deployment: Deployment) -> None:
        try:
            told = await cache_status(self._plugin.tasks, deployment)
        except Exception:
            logger.exception(
                "The caches of %r could not be asked",
                deployment.name,
                deployment=deployment.name,
                version=deployment.active,
                stimulus_id=f"daskinfer-cache-{deployment.name}",
            )
        else:
            self._told[deployment.name] = told

    def close(self) -> None:
        """Ask nobody any more, and wait for no answer."""
        self._is_closed = True
        for task in list(self._tasks.values()):
            task.cancel()
