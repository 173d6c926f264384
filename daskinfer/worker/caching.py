"""The result caches of a worker: opened with models, tended by one timer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from distributed.metrics import monotonic
from distributed.threadpoolexecutor import ThreadPoolExecutor
from tornado.ioloop import PeriodicCallback

from daskinfer import protocol
from daskinfer.cache.contents import nbytes
from daskinfer.caching import CachePolicy
from daskinfer.failure import contain
from daskinfer.logs import Log
from daskinfer.worker.pending import Pending
from daskinfer.worker.result_cache import ResultCache, ids
from daskinfer.worker.threads import run_on

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.cache import CacheKey
    from daskinfer.worker.job import Job

logger = Log("caching")

#: Milliseconds between looks at memory and time, as often as Dask looks at memory.
_TEND_EVERY = 100
#: Seconds between looks at what has left a cache.
_REPORT_EVERY = 2.0
#: Caches give memory back from this share of where Dask begins to spill or pause.
_CAUTION = 0.9
#: Bytes of results that wait to be stored; while there are more, others are not.
_MOST_WAITING = 32 * 2**20


class Shrinkable(Protocol):
    """What can give memory of the host back."""

    @property
    def nbytes(self) -> int:
        """Bytes that it has."""

    def shrink(self, nbytes: int, /) -> int:
        """Give so many back at least, or all; return how many. From any thread."""


class Caches:
    """The result caches of one worker, by deployment.

    Memory goes back before Dask spills or pauses the worker: a timer compares the
    process's memory with what the worker may use, as often as Dask does itself.

    Parameters
    ----------
    worker
        Whose they are.

    Notes
    -----
    Lives on the worker's event loop. Look-ups have a thread, and so has what is stored.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._caches: dict[str, ResultCache] = {}
        self._others: list[Shrinkable] = []
        self._finder = ThreadPoolExecutor(1, thread_name_prefix="daskinfer-look-up")
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="daskinfer-keep")
        self._waiting = 0
        self._is_short = False
        self._report_at = 0.0

    def __repr__(self) -> str:
        return f"<Caches of {sorted(self._caches)}>"

    # Life

    def open(self, name: str, message: dict[str, Any] | None) -> None:
        """A model of a deployment is loaded here; None: its results are not cached."""
        if message is None:
            self._drop(name)
            return
        policy = CachePolicy.from_message(message)
        cache = self._caches.get(name)
        if cache is not None and cache.policy == policy:
            return
        self._drop(name)
        self._caches[name] = cache = ResultCache.configured(name, policy)
        # What is on disk is found before it is asked for.
        self._keeper.submit(contain, cache.sweep)
        self._begin_to_tend()

    def shrink_too(self, other: Shrinkable) -> None:
        """Have something else give memory back as well, from now on."""
        if other not in self._others:
            self._others.append(other)
            self._begin_to_tend()

    def keep_only(self, names: Iterable[str]) -> None:
        """Let go of what belongs to deployments that are gone."""
        for name in set(self._caches).difference(names):
            self._drop(name)

    def _drop(self, name: str) -> None:
        cache = self._caches.pop(name, None)
        if cache is not None:
            self._keeper.submit(contain, cache.clear)

    async def close(self) -> None:
        """Write to disk what the next process can use."""
        caches, self._caches = self._caches, {}
        for cache in caches.values():
            await self.store(cache.close)
        self._finder.shutdown(wait=False)
        self._keeper.shutdown(wait=False)

    # Use

    def asked(self, job: Job) -> ResultCache | None:
        """The cache to ask about a batch; None if there is none worth asking."""
        cache = self._caches.get(job.model.name)
        if job.model.kind != protocol.PLAIN or job.streams:
            return None
        if cache is None or job.held or cache.gate.is_open(monotonic()):
            return cache
        cache.counts["skipped"] += len(job.payloads)
        return None

    async def look_up(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on the thread of look-ups."""
        return await run_on(self._finder, function, *args)

    async def store(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on the thread of what is stored."""
        return await run_on(self._keeper, function, *args)

    def in_background(
        self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> None:
        """Begin something that nobody waits for."""
        self._worker._ongoing_background_tasks.call_soon(function, *args)

    async def keep(
        self, cache: ResultCache, results: dict[CacheKey, Any], generation: int
    ) -> None:
        """Store results of which the scheduler is told with the answer.

        They are dropped while memory is short, or more than can be stored is waiting.
        """
        if self._is_short or self._waiting > _MOST_WAITING:
            cache.counts["dropped"] += len(results)
            self._report(cache, b"", ids(results))
            return
        size = sum(map(nbytes, results.values()))
        self._waiting += size
        try:
            refused = await self.store(_put_all, cache, results, generation)
        finally:
            self._waiting -= size
        self._report(cache, b"", ids(refused))

    def _report(self, cache: ResultCache, added: bytes, dropped: bytes) -> None:
        if not (added or dropped) or self._caches.get(cache.name) is not cache:
            return
        message: protocol.CachedMessage = {
            "op": protocol.CACHED,
            "name": cache.name,
            "added": added,
            "dropped": dropped,
        }
        self._worker.batched_send(dict(message))

    # Calls

    async def statistics(self, name: str) -> dict[str, Any] | None:
        """What can be known of a deployment's cache; None if there is none."""
        cache = self._caches.get(name)
        return None if cache is None else cache.statistics(monotonic())

    def figures(self, now: float) -> dict[str, dict[str, Any]]:
        """What can be known of all caches at a time, by deployment."""
        return {name: c.statistics(now) for name, c in self._caches.items()}

    async def clear(self, name: str) -> None:
        """Forget all results of a deployment, and keep none of those under way."""
        cache = self._caches.get(name)
        if cache is not None:
            # Who asks from now on is not given what was computed before.
            cache.pending = Pending()
            await self.store(cache.clear)
            added, dropped = await self.store(cache.changes)
            self._report(cache, added, dropped)

    # Time and space

    def _begin_to_tend(self) -> None:
        if "daskinfer-caches" not in self._worker.periodic_callbacks:
            timer = PeriodicCallback(self._tend, _TEND_EVERY)
            self._worker.periodic_callbacks["daskinfer-caches"] = timer
            timer.start()

    async def _tend(self) -> None:
        try:
            await self._give_back()
            now = monotonic()
            reports = now >= self._report_at
            for cache in list(self._caches.values()):
                if cache.is_overdue(now):
                    await self.store(cache.sweep)
                if reports:
                    self._report(cache, *await self.store(cache.changes))
            if reports:
                self._report_at = monotonic() + _REPORT_EVERY
        except Exception:
            logger.exception("Caches could not be tended")

    async def _give_back(self) -> None:
        manager = self._worker.memory_manager
        excess = excess_bytes(
            self._worker.monitor.get_process_memory(),
            manager.memory_limit,
            manager.memory_spill_fraction,
            manager.memory_pause_fraction,
        )
        self._is_short = excess > 0
        all_of_them: list[Shrinkable] = [*self._caches.values(), *self._others]
        for one in sorted(all_of_them, key=lambda one: -one.nbytes):
            if excess <= 0:
                break
            held = one.nbytes
            if held:
                excess -= await self.store(one.shrink, min(excess, held))


def excess_bytes(
    memory: int,
    limit: int | None,
    spill: float | bool,
    pause: float | bool,
) -> int:
    """Bytes that a process has above what it may have before Dask acts.

    Parameters
    ----------
    memory
        Bytes that it has.
    limit
        What the worker may use; None: anything.
    spill, pause
        Shares of that from which on Dask spills, and pauses the worker; False: never.

    Examples
    --------
    >>> excess_bytes(700, 1000, 0.7, 0.8), excess_bytes(600, 1000, 0.7, 0.8)
    (70, 0)
    >>> excess_bytes(10**12, None, 0.7, 0.8), excess_bytes(990, 1000, False, False)
    (0, 0)
    """
    shares = [share for share in (spill, pause) if share is not False]
    if not limit or not shares:
        return 0
    return max(memory - round(_CAUTION * min(shares) * limit), 0)


def _put_all(
    cache: ResultCache, results: dict[CacheKey, Any], generation: int
) -> list[CacheKey]:
    """Store results; return the keys of those that no tier takes."""
    refused = [
        key for key, value in results.items() if not cache.put(key, value, generation)
    ]
    cache.stored(results.keys() - set(refused))
    return refused
