"""Batches of equal requests on one worker, in every order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from daskinfer import CachePolicy, transport
from daskinfer.cache import CacheKey
from daskinfer.worker.cached_run import CachedRun
from daskinfer.worker.execution import Outcome
from daskinfer.worker.job import Job
from daskinfer.worker.pending import Pending
from daskinfer.worker.result_cache import ResultCache, ids


class Setting:
    """A worker whose look-ups and stores wait for the test."""

    def __init__(self) -> None:
        self.cache = ResultCache("net", CachePolicy())
        self.events: list[Any] = []
        self.computed: list[list[str]] = []
        self.jobs: list[Job] = []
        self.device = asyncio.Event()
        self.broken: BaseException | None = None
        self.looked = asyncio.Event()
        self.looking = asyncio.Event()
        self.storing = asyncio.Event()
        self.looked.set()
        self.storing.set()
        self.background: set[asyncio.Task[None]] = set()

    async def look_up(self, function: Callable[..., Any], *args: Any) -> Any:
        found = function(*args)
        self.looking.set()
        await self.looked.wait()
        return found

    def in_background(self, function: Any, *args: Any) -> None:
        task = asyncio.ensure_future(function(*args))
        self.background.add(task)

    async def keep(self, cache: ResultCache, results: Any, generation: int) -> None:
        await self.storing.wait()
        for key, value in results.items():
            cache.put(key, value, generation)

    async def clear(self) -> None:
        self.cache.pending = Pending()
        self.cache.clear()

    def ask(
        self, requests: dict[str, int], fail: Collection[str] = ()
    ) -> asyncio.Task[Outcome]:
        """Begin to answer a batch: a number for each key."""
        payloads: Any = {
            key: bytes(transport.dumps(((number,), {}))[0])
            for key, number in requests.items()
        }
        model: Any = SimpleNamespace(name="net", digest="digest")
        done: Any = asyncio.get_running_loop().create_future()
        job = Job("b", model, payloads, {}, [], 8, 0, {}, False, 0.0, {}, done)

        def execute(keys: Collection[str], calls: Any) -> Outcome:
            self.computed.append(list(keys))
            outcome = Outcome()
            outcome.broken = self.broken
            for key in keys:
                if key in job.dropped or self.broken is not None:
                    continue
                if key in fail:
                    outcome.errors[key] = ArithmeticError(key)
                else:
                    outcome.results[key] = [requests[key]]
            return outcome

        async def on_device(function: Callable[[], Any]) -> Any:
            await self.device.wait()
            # On a thread it never is there at once.
            await settle()
            return function()

        run = CachedRun(
            self,  # type: ignore[arg-type]
            self.cache,
            job,
            execute,  # type: ignore[arg-type]
            on_device,
            lambda: self.events.append("long"),
            self.events.append,
        )
        self.jobs.append(job)
        return asyncio.ensure_future(run.answer({}))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_equal_requests_of_two_batches_are_computed_once() -> None:
    async def main() -> None:
        setting = Setting()
        first = setting.ask({"a": 1, "b": 1, "c": 2})
        await settle()
        second = setting.ask({"d": 1, "e": 3})
        await settle()
        setting.device.set()
        outcome = await first
        assert outcome.results == {"a": [1], "b": [1], "c": [2]}
        assert outcome.cached == {"b"}
        other = await second
        assert other.results == {"d": [1], "e": [3]} and other.cached == {"d"}
        assert setting.computed == [["a", "c"], ["e"]]
        answers = [outcome.results[key] for key in "ab"] + [other.results["d"]]
        assert len({id(answer) for answer in answers}) == 3, "each has its own"

    asyncio.run(main())


def test_a_result_that_is_stored_during_a_look_up_is_not_computed_again() -> None:
    async def main() -> None:
        setting = Setting()
        setting.device.set()
        setting.storing.clear()
        await setting.ask({"a": 1})
        setting.looked.clear()
        setting.looking.clear()
        second = setting.ask({"b": 1})
        await setting.looking.wait()
        # It has found nothing, and hears of nothing that is under way any more.
        setting.storing.set()
        await asyncio.gather(*setting.background)
        setting.looked.set()
        outcome = await second
        assert outcome.results == {"b": [1]} and outcome.cached == {"b"}
        assert setting.computed == [["a"]]
        assert not len(setting.cache.pending)
        assert not setting.cache.pending._watching

    asyncio.run(main())


def test_who_waited_for_one_that_failed_is_computed_itself() -> None:
    async def main() -> None:
        setting = Setting()
        first = setting.ask({"a": 1, "b": 2}, fail={"a"})
        await settle()
        second = setting.ask({"c": 1, "d": 1})
        await settle()
        setting.device.set()
        outcome = await first
        assert list(outcome.errors) == ["a"] and outcome.results == {"b": [2]}
        other = await second
        assert other.results == {"c": [1], "d": [1]} and not other.errors
        assert setting.computed == [["a", "b"], ["c"]]

    asyncio.run(main())


def test_nobody_waits_for_a_batch_that_could_not_be_run() -> None:
    async def main() -> None:
        setting = Setting()
        first = setting.ask({"a": 1})
        await settle()
        second = setting.ask({"b": 1})
        await settle()
        first.cancel()
        await asyncio.wait([first])
        setting.device.set()
        assert (await second).results == {"b": [1]}
        assert setting.computed == [["b"]]

    asyncio.run(main())


def test_who_is_not_wanted_any_more_is_computed_for_who_is() -> None:
    async def main() -> None:
        setting = Setting()
        first = setting.ask({"a": 1, "b": 1})
        await settle()
        second = setting.ask({"c": 1})
        await settle()
        setting.jobs[0].dropped.add("a")
        setting.device.set()
        assert (await first).results == {"b": [1]}
        assert (await second).results == {"c": [1]}
        # Once for those that are left, in whichever batch.
        assert setting.computed == [["a"], ["b"]]
        await asyncio.gather(*setting.background)
        assert not len(setting.cache.pending)

    asyncio.run(main())


def test_a_device_that_breaks_leaves_nobody_waiting() -> None:
    async def main() -> None:
        setting = Setting()
        setting.device.set()
        await setting.ask({"known": 9})
        await asyncio.gather(*setting.background)
        setting.device.clear()
        first = setting.ask({"a": 1})
        await settle()
        second = setting.ask({"b": 1, "c": 9})
        await settle()
        setting.broken = RuntimeError("it is broken")
        setting.device.set()
        assert (await first).broken is setting.broken
        other = await second
        # What was found is answered; of the rest the scheduler decides.
        assert other.broken is setting.broken and other.results == {"c": [9]}
        assert not other.errors and not len(setting.cache.pending)

    asyncio.run(main())


def test_what_was_under_way_is_not_given_to_who_asks_after_a_clear() -> None:
    async def main() -> None:
        setting = Setting()
        first = setting.ask({"a": 1})
        await settle()
        await setting.clear()
        second = setting.ask({"b": 1})
        await settle()
        setting.device.set()
        assert (await first).results == {"a": [1]}
        other = await second
        assert other.results == {"b": [1]} and not other.cached
        assert setting.computed == [["a"], ["b"]]
        await asyncio.gather(*setting.background)
        assert (await setting.ask({"c": 1})).cached == {"c"}

    asyncio.run(main())


def test_it_tells_what_is_not_there() -> None:
    async def main() -> None:
        setting = Setting()
        setting.device.set()
        await setting.ask({"a": 1})
        await asyncio.gather(*setting.background)
        setting.events.clear()
        await setting.ask({"b": 1})
        assert setting.events == []
        await setting.ask({"c": 1, "d": 2})
        (dropped,) = setting.events
        assert len(dropped) == len(ids([CacheKey.of("x")]))

    asyncio.run(main())


def test_it_tells_when_it_takes_long_to_look_up() -> None:
    async def main() -> None:
        setting = Setting()
        setting.device.set()
        setting.looked.clear()
        asked = setting.ask({"a": 1})
        while not setting.events:
            await asyncio.sleep(0.001)
        setting.looked.set()
        await asked
        assert setting.events[0] == "long" and len(setting.events) == 2

    asyncio.run(main())


def test_answers_to_equal_requests_count_as_hits_for_the_gate() -> None:
    async def main() -> None:
        setting = Setting()
        told: list[tuple[int, int]] = []
        setting.cache.gate = SimpleNamespace(  # type: ignore[assignment]
            looked_up=lambda lookups, hits, now: told.append((lookups, hits))
        )
        setting.device.set()
        await setting.ask({"a": 1, "b": 1, "c": 2})
        assert told == [(3, 1)]

    asyncio.run(main())
