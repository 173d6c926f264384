"""What is asked of the workers' caches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from daskinfer.cache.totals import CacheStatus

if TYPE_CHECKING:
    from scheduler_plugins.deployment import Deployment
    from scheduler_plugins.taskstate import TaskStates

#: Seconds that a worker may take to tell of its cache; and to empty it.
_PATIENCE = 2.0
_CLEARING = 60.0


async def cache_status(tasks: TaskStates, deployment: Deployment) -> CacheStatus | None:
    """Add up what the workers tell of a deployment's cache; None if it has none."""
    if deployment.cache is None:
        return None
    answers = await _ask(tasks, deployment, "statistics", _PATIENCE)
    told = [answer for answer in answers.values() if isinstance(answer, dict)]
    return CacheStatus.sum(told, _silent(answers))


async def clear_caches(tasks: TaskStates, deployment: Deployment) -> list[str]:
    """Empty the caches of a deployment; return the workers that did not answer."""
    if deployment.cache is None:
        return []
    return _silent(await _ask(tasks, deployment, "clear", _CLEARING))


async def _ask(
    tasks: TaskStates, deployment: Deployment, what: str, patience: float
) -> dict[str, Any]:
    """Answers of the workers that have a version, by address; or their exceptions."""

    async def ask(address: str) -> Any:
        call = getattr(tasks.rpc(address), f"daskinfer_cache_{what}")
        return await asyncio.wait_for(call(name=deployment.name), patience)

    addresses = sorted(
        {
            address
            for version in deployment.versions.values()
            for address in version.replicas
            if tasks.has_worker(address)
        }
    )
    asked = [ask(address) for address in addresses]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return dict(zip(addresses, answers, strict=True))


def _silent(answers: dict[str, Any]) -> list[str]:
    return [
        address
        for address, answer in answers.items()
        if isinstance(answer, BaseException)
    ]
