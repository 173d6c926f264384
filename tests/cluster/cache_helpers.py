"""Looks into the result caches of a worker."""

from __future__ import annotations

from typing import Any

from distributed import Worker

from daskinfer.worker.result_cache import ResultCache
from tests.cluster.helpers import until


def caches(worker: Worker) -> Any:
    """All that a worker has."""
    runtime: Any = worker.plugins["daskinfer-runtime"]
    return runtime.caches


def cache_of(worker: Worker) -> ResultCache:
    """The only one that a worker has."""
    cache: ResultCache
    (cache,) = caches(worker)._caches.values()
    return cache


async def until_stored(worker: Worker, entries: int = 1) -> None:
    """Wait until so many results are found again: answers do not wait for that."""
    cache = cache_of(worker)
    await until(lambda: len(cache._tiers.digests()) == entries)
    await until(lambda: not len(cache.pending))
