"""What daskinfer runs in the scheduler process.

As a preload, ``dask scheduler --preload scheduler_plugins``, it is there from the
start; otherwise :func:`daskinfer.deploy` registers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_plugins.inference import InferencePlugin

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

__all__ = ["InferencePlugin", "dask_setup"]


async def dask_setup(scheduler: Scheduler) -> None:
    """Install the plugin when the scheduler starts (Dask's preload protocol)."""
    plugin = InferencePlugin()
    scheduler.add_plugin(plugin, idempotent=True, name=plugin.name)
    if scheduler.plugins[plugin.name] is plugin:
        await plugin.start(scheduler)
