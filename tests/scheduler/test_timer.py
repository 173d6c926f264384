"""One timer, set again and again."""

from __future__ import annotations

import asyncio
import math

from scheduler_plugins.timer import Timer
from tests.scheduler.virtual import on_loop


class Rung:
    """When a timer has called, by the loop's clock."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.times: list[float] = []
        self.timer = Timer(self)

    def __call__(self) -> None:
        assert self.timer.at == math.inf
        self.times.append(round(self.loop.time(), 6))


@on_loop
async def test_it_calls_once_at_the_time_set_last():
    rung = Rung()
    start = rung.loop.time()
    for after in (5.0, 2.0, 9.0, 7.0):
        rung.timer.set(start + after)
    await asyncio.sleep(100)
    assert rung.times == [round(start + 7.0, 6)]


@on_loop
async def test_later_times_cost_the_event_loop_nothing(monkeypatch):
    rung = Rung()
    start, asked = rung.loop.time(), []
    call_later = rung.loop.call_later
    monkeypatch.setattr(
        rung.loop, "call_later", lambda *args: asked.append(1) or call_later(*args)
    )
    for i in range(1000):
        rung.timer.set(start + 1.0 + i)
    assert len(asked) == 1
    await asyncio.sleep(2000)
    assert rung.times == [round(start + 1000.0, 6)]
    assert len(asked) <= 3


@on_loop
async def test_set_to_never_it_does_not_call():
    rung = Rung()
    start = rung.loop.time()
    rung.timer.set(start + 1.0)
    rung.timer.set(math.inf)
    await asyncio.sleep(10)
    rung.timer.set(start + 20.0)
    rung.timer.cancel()
    await asyncio.sleep(100)
    assert rung.times == []
