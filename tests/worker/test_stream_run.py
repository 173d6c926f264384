"""Streams of several batches that take their turns together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from daskinfer.worker.execution import Item
from daskinfer.worker.slots import Slots
from daskinfer.worker.stream_run import JoinedRun

MODEL = SimpleNamespace(name="m", producer=SimpleNamespace(live=["of the past"]))


def job(batch: str, dropped: frozenset[str] = frozenset()) -> Any:
    return SimpleNamespace(
        batch=batch, model=MODEL, idle_timeout=None, streams={}, dropped=dropped
    )


def items(*keys: str) -> list[Item]:
    return [Item(key, lambda: ((), {})) for key in keys]


def test_each_batch_ends_with_its_last_stream() -> None:
    async def main() -> None:
        run = JoinedRun(job("none"))
        assert not run.lives
        first = run.join(job("1"), items("a", "b"))
        second = run.join(job("2", frozenset("c")), items("c"))
        assert run.changed.is_set()
        assert [item.key for item in run.coming] == ["a", "b", "c"]
        found = [
            (j.batch, [s.key for s in its])
            for j, its in run.by_job(list(run.lives.values()))
        ]
        assert found == [("1", ["a", "b"]), ("2", ["c"])]
        assert run.dropped() == ["c"]
        assert second.done() and not first.done()
        run.remove("a")
        assert not first.done()
        run.remove("b")
        assert first.done()
        assert not run.items and not run.lives

    asyncio.run(main())


def test_who_is_not_wanted_before_the_first_turn_does_not_come() -> None:
    async def main() -> None:
        run = JoinedRun(job("none"))
        first = run.join(job("1"), items("a", "b"))
        run.lives["a"].dropped = True
        assert run.dropped() == ["a"]
        assert [item.key for item in run.coming] == ["b"]
        # It is sent again, and the one of the past has not been started either.
        run.lives["b"].dropped = True
        second = run.join(job("2"), items("b"))
        assert [item.key for item in run.coming] == ["b"]
        assert run.coming == [run.items["b"]]
        assert first.done() and not second.done()
        run.close()

    asyncio.run(main())


def test_one_that_comes_again_is_told_nothing_of_its_past() -> None:
    async def main() -> None:
        run = JoinedRun(job("none"))
        first = run.join(job("1"), items("a"))
        run.coming.clear()
        run.lives["a"].dropped = True
        second = run.join(job("2"), items("a"))
        assert first.done() and not second.done()
        # The producer is to drop what it has before it is given the other.
        assert run.is_to_come("a")
        assert run.dropped() == ["a"]
        assert list(run.lives) == ["a"] and not run.lives["a"].dropped
        run.close()
        assert second.done()

    asyncio.run(main())


def test_what_they_had_of_the_device_is_counted_for_each() -> None:
    async def main() -> None:
        run = JoinedRun(job("none"))
        run.join(job("1"), items("a"))
        run.share.used = 6.0
        run.join(job("2"), items("b", "c"))
        assert run.share.used == 2.0
        run.close()

    asyncio.run(main())


def test_news_are_told_once() -> None:
    async def main() -> None:
        run = JoinedRun(job("none"))
        slots = MODEL.producer.slots = Slots(64)
        assert run.learned() and not run.learned()
        for _ in range(3):
            slots.stepped(8, 0.010, now=0.0)
        assert run.learned() and not run.learned()
        for _ in range(30):
            slots.stepped(8, 0.030, now=0.0)
        assert run.learned()

    asyncio.run(main())


def test_turns_are_of_no_use_while_one_alone_has_the_room() -> None:
    async def main() -> None:
        producer: Any = SimpleNamespace(live=["a"], waits=True)
        model: Any = SimpleNamespace(name="m", producer=producer)
        about = job("1")
        about.model = model
        run = JoinedRun(about)
        run.join(about, items("a"))
        run.changed.clear()
        assert not run.may_step()
        producer.waits = False
        producer.on_room()
        await asyncio.wait_for(run.changed.wait(), timeout=30)
        assert run.may_step()
        run.paused = {"a"}
        assert not run.may_step()
        # Others begin anew before this one has been let go of.
        other = JoinedRun(about)
        run.close()
        producer.on_room()
        await asyncio.wait_for(other.changed.wait(), timeout=30)
        other.close()
        assert producer.on_room is None

    asyncio.run(main())
