"""Steps of streams, and what is looked at while they run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from daskinfer.worker.stream_steps import Steps


class Sending:
    """Notes what is sent, and lets a step end then."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()

    def deliver(self, run: Any, emissions: Any) -> None:
        assert not emissions

    def send(self, run: Any) -> None:
        self.sent.set()


class Ending:
    """A run whose step ends on the device's thread between any two looks at it."""

    idle_timeout = None
    producer = SimpleNamespace(at_work=None)

    def __init__(self) -> None:
        self.looks = 0

    @property
    def started(self) -> float | None:
        self.looks += 1
        return 0.0 if self.looks % 2 else None


def test_step_may_end_between_any_two_looks_at_it() -> None:
    async def main() -> None:
        sending = Sending()
        around: Any = SimpleNamespace(address="tcp://10.0.0.1:1")
        steps = Steps(around, around, around, sending)  # type: ignore[arg-type]
        run: Any = Ending()

        async def turn() -> list[Any]:
            await sending.sent.wait()
            return []

        limited = steps._limited(run, turn())
        assert await asyncio.wait_for(limited, timeout=30) == []
        assert run.looks

    asyncio.run(main())
