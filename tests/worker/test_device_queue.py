"""The queue before a worker's device."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from daskinfer.worker.device_queue import DeviceQueue

PATIENCE = 30


def test_who_waits_for_an_idle_device_comes_after_all_that_others_want() -> None:
    asyncio.run(_others_first())


async def _others_first() -> None:
    worker: Any = SimpleNamespace(address="tcp://w:1")
    queue = DeviceQueue(worker)
    gate, order = threading.Event(), list[str]()
    try:
        await queue.idle(PATIENCE)  # at once: nothing is there

        def run(name: str) -> None:
            assert gate.wait(PATIENCE)
            order.append(name)

        first = asyncio.ensure_future(queue.run({}, run, "first"))
        await asyncio.sleep(0)
        idle = asyncio.ensure_future(queue.idle(PATIENCE))
        second = asyncio.ensure_future(queue.run({}, run, "second"))
        await asyncio.sleep(0)
        assert not idle.done()
        # Not for longer than it likes to.
        await queue.idle(0.001)
        gate.set()
        await idle
        assert order == ["first", "second"]
        await asyncio.gather(first, second)
    finally:
        gate.set()
        queue.close()
