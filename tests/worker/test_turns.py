"""Which stream has the device next."""

from __future__ import annotations

import asyncio

import pytest

from daskinfer.worker.turns import Share, Turns, choose


def test_who_has_used_the_least_is_next() -> None:
    shares = [Share(3.0, 1.0), Share(1.0, 1.0), Share(2.0, 1.0)]
    assert choose(shares, 1.05) is shares[1]


def test_nobody_waits_for_ever() -> None:
    patient = Share(100.0, waits_since=1.0)
    assert choose([patient, Share(0.0, 1.1)], 1.09) is not patient
    assert choose([patient, Share(0.0, 1.1)], 1.1) is patient


def test_turns_are_taken_one_by_one_in_that_order() -> None:
    async def main() -> list[str]:
        turns, order = Turns(), list[str]()

        async def have(name: str, share: Share) -> None:
            async with turns.turn(share):
                order.append(name)
                await asyncio.sleep(0)
                order.append(name)

        await asyncio.gather(
            have("first", Share(9.0)),
            have("long", Share(5.0)),
            have("short", Share(1.0)),
            have("middle", Share(3.0)),
        )
        return order

    order = asyncio.run(main())
    assert order[::2] == order[1::2] == ["first", "short", "middle", "long"]


@pytest.mark.parametrize("when", ["waiting", "chosen"])
def test_who_gives_up_keeps_nobody_waiting(when: str) -> None:
    async def main() -> bool:
        turns, had = Turns(), asyncio.Event()

        async def have() -> None:
            async with turns.turn(Share()):
                had.set()

        async with turns.turn(Share()):
            gone = asyncio.create_task(have())
            await asyncio.sleep(0)
            if when == "waiting":
                gone.cancel()
                await asyncio.sleep(0)
        if when == "chosen":
            gone.cancel()
        await asyncio.wait({gone})
        await asyncio.wait_for(have(), 10)
        return had.is_set()

    assert asyncio.run(main())
