"""A batch of a deployment whose results are cached: only what is new is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from dask.typing import Key
from distributed.metrics import monotonic

from daskinfer import payload
from daskinfer.cache import CacheKey
from daskinfer.cache.contents import isolate
from daskinfer.failure import origin
from daskinfer.logs import Log
from daskinfer.worker.execution import Call, Outcome
from daskinfer.worker.inputs import load_call
from daskinfer.worker.pending import MISSING
from daskinfer.worker.result_cache import ResultCache, copy_of, ids

if TYPE_CHECKING:
    from daskinfer.worker.caching import Caches
    from daskinfer.worker.job import Job

logger = Log("caching")

#: Seconds after which the scheduler is to know that a batch is still looked up.
_LONG = 0.010

#: Runs some of a batch's requests: of their keys, and of the calls that are loaded.
Execute: TypeAlias = Callable[[Collection[Key], dict[Key, Call]], Outcome]
#: Has a function run on the device's thread.
OnDevice: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(slots=True)
class Found:
    """What a look-up has found out about a batch."""

    results: dict[Key, Any] = field(default_factory=dict)
    #: By request, for those whose results can be cached.
    names: dict[Key, CacheKey] = field(default_factory=dict)
    #: Those that had to be loaded to know what they say.
    calls: dict[Key, Call] = field(default_factory=dict)
    seconds: float = 0.0


class CachedRun:
    """Answers a batch from a cache as far as it can, and has the rest computed.

    Each request is looked up. Of those that are not there, identical ones are computed
    once, and not at all if another batch of this worker is about to.

    Parameters
    ----------
    caches
        The worker's.
    cache
        The deployment's.
    job
        The batch.
    execute, on_device
        How requests are computed.
    looks_long
        Called if it takes long to look up.
    not_found
        Called if not all are found, with the names of those that could have been.

    Notes
    -----
    Nothing waits in a circle, and no batch for one behind it: each begins what it
    computes itself in the order in which it takes its turn on the device, and waits
    for others only when that is done.
    """

    def __init__(
        self,
        caches: Caches,
        cache: ResultCache,
        job: Job,
        execute: Execute,
        on_device: OnDevice,
        looks_long: Callable[[], None],
        not_found: Callable[[bytes], None],
    ) -> None:
        self._caches = caches
        self._cache = cache
        self._job = job
        self._run = execute
        self._on_device = on_device
        self._looks_long = looks_long
        self._not_found = not_found
        # Should the cache be cleared meanwhile, these are of the past.
        self._pending = cache.pending
        self._generation = cache.generation
        self._found = Found()
        self._outcome = Outcome()

    def __repr__(self) -> str:
        return f"<CachedRun of {self._job.batch}>"

    async def answer(self, inputs: dict[Key, Any]) -> Outcome:
        """Find or compute all results of the batch."""
        outcome = self._outcome
        loop = asyncio.get_running_loop()
        long = loop.call_later(_LONG, self._looks_long)
        try:
            with self._pending.watch() as left:
                self._found = found = await self._caches.look_up(
                    _look_up, self._cache, self._job, inputs
                )
        finally:
            long.cancel()
        self._cache.counts["uncacheable"] += len(self._job.payloads) - len(found.names)
        outcome.results |= found.results
        outcome.cached |= found.results.keys()
        outcome.look_up = found.seconds
        for key in self._unanswered():
            name = found.names.get(key)
            if name is not None:
                future = left.get(name) or self._pending.find(name)
                if future is not None and future.done():
                    self._take(key, future.result())
        waiting = self._unanswered()
        if waiting:
            names = [found.names[key] for key in waiting if key in found.names]
            self._not_found(ids(names))
        while waiting and outcome.broken is None:
            await self._compute_or_wait(waiting)
            waiting = self._unanswered()
        self._cache.gate.looked_up(len(found.names), len(outcome.cached), monotonic())
        return outcome

    def _unanswered(self) -> list[Key]:
        outcome = self._outcome
        answered = outcome.results.keys() | outcome.errors.keys() | self._job.dropped
        answered |= set(outcome.streaming)
        return [key for key in self._job.payloads if key not in answered]

    async def _compute_or_wait(self, waiting: list[Key]) -> None:
        """Compute what nobody else does, and wait for the rest.

        Whoever waited for one that has failed, or is not wanted any more, is left.
        """
        names = self._found.names
        others: dict[Key, asyncio.Future[Any]] = {}
        own: dict[CacheKey | Key, Key] = {}
        for key in waiting:
            future = self._pending.find(names[key]) if key in names else None
            if future is not None:
                others[key] = future
            else:
                own.setdefault(names.get(key, key), key)
        kept = await self._compute(list(own.values())) if own else {}
        for key in waiting:
            if key not in self._outcome.results and names.get(key) in kept:
                self._take(key, kept[names[key]])
        for key, future in others.items():
            self._take(key, await asyncio.shield(future))

    async def _compute(self, keys: list[Key]) -> dict[CacheKey, Any]:
        """Compute requests; return copies of what can be kept."""
        found, cache, pending = self._found, self._cache, self._pending
        names = {key: found.names[key] for key in keys if key in found.names}
        for name in names.values():
            pending.begin(name)
        kept: dict[CacheKey, Any] = {}
        try:
            part, copies = await self._on_device(
                partial(_execute, self._run, keys, found.calls, names)
            )
            _merge(self._outcome, part)
            refused = sum(key in part.results for key in names) - len(copies)
            cache.counts["uncacheable"] += refused
            kept = {names[key]: value for key, value in copies.items()}
            for name, value in kept.items():
                pending.computed(name, value)
            # Found by whoever looks from now on, here if not yet in the cache.
            self._outcome.kept += cache.told(kept)
        finally:
            pending.end(name for name in names.values() if name not in kept)
            if kept:
                self._caches.in_background(self._keep, kept)
        return kept

    async def _keep(self, kept: dict[CacheKey, Any]) -> None:
        try:
            await self._caches.keep(self._cache, kept, self._generation)
        finally:
            self._pending.end(kept)

    def _take(self, key: Key, value: Any) -> None:
        """Answer a request with what was computed for an identical one."""
        if value is not MISSING:
            self._outcome.results[key] = isolate(value)
            self._outcome.cached.add(key)
            self._cache.counts["joined"] += 1


def _look_up(cache: ResultCache, job: Job, inputs: dict[Key, Any]) -> Found:
    """Look for all results of a batch (on the thread of look-ups)."""
    started = perf_counter()
    found = Found()
    given = inputs if job.who_has else None
    for key, body in job.payloads.items():
        content = job.contents.get(key)
        if content is None:
            try:
                found.calls[key] = call = load_call(body, given)
                content = payload.content_of(*call)
            except Exception:
                # Of no stable content; or it cannot be loaded, as will be told when
                # it is tried again.
                continue
        name = found.names[key] = cache.key(job.model.digest, content)
        value = cache.get(name)
        if value is not MISSING:
            found.results[key] = value
    found.seconds = perf_counter() - started
    return found


def _execute(
    execute: Execute,
    keys: list[Key],
    calls: dict[Key, Call],
    names: dict[Key, CacheKey],
) -> tuple[Outcome, dict[Key, Any]]:
    """Compute, and copy what is to be kept before anybody can change it."""
    outcome = execute(keys, calls)
    copies: dict[Key, Any] = {}
    for key in names:
        if key in outcome.results:
            try:
                copies[key] = copy_of(outcome.results[key])
            except Exception as error:  # or the value's own code
                logger.debug("A result is not cached: %s", origin(error))
    return outcome, copies


def _merge(outcome: Outcome, part: Outcome) -> None:
    outcome.results |= part.results
    outcome.errors |= part.errors
    outcome.passes += part.passes
    outcome.flows += part.flows
    sizes = [n for n in (outcome.out_of_memory, part.out_of_memory) if n]
    outcome.out_of_memory = min(sizes, default=0)
    outcome.broken = part.broken
    outcome.struck += part.struck
