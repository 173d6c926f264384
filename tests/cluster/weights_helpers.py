"""Loading and unloading behind the scheduler's back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

from distributed import Scheduler, Worker

from daskinfer import protocol
from daskinfer.worker.loading import Loader
from tests.cluster.helpers import until
from tests.cluster.scheduling_helpers import engine

_WATCHED = (protocol.LOADED, protocol.UNLOADED, protocol.PARKED)
#: Unlike the scheduler's own.
_NUMBERS = count(1_000_000)


class Hand:
    """Tells a worker what to load and to unload, and hears its answers.

    The scheduler hears none of them, and goes on with what it knew before.

    Attributes
    ----------
    heard
        ``(op, name)`` of what was heard, in order; of PARKED with what it says.
    """

    def __init__(self, scheduler: Scheduler, worker: Worker) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self._scheduler = scheduler
        self._worker = worker
        self._answers: dict[int, dict[str, Any]] = {}
        for op in _WATCHED:
            scheduler.stream_handlers[op] = partial(self._hear, op)

    @property
    def loader(self) -> Loader:
        return self._worker.plugins["daskinfer-runtime"].loader  # type: ignore[attr-defined, no-any-return]

    def _hear(self, op: str, worker: str, **message: Any) -> None:
        about = [message["parked"]] if op == protocol.PARKED else []
        self.heard.append((op.removeprefix("daskinfer-"), message["name"], *about))
        for number in ("load", "unload"):
            if number in message:
                self._answers[message[number]] = message

    def unload(self, name: str, keep: bool = True, version: str = "1") -> int:
        """Have it unload; return the number of the message."""
        message: protocol.UnloadMessage = {
            "op": protocol.UNLOAD,
            "name": name,
            "version": version,
            "unload": next(_NUMBERS),
            "keep": keep,
            "stimulus_id": "test",
        }
        self._scheduler.worker_send(self._worker.address, dict(message))
        return message["unload"]

    def load(self, name: str, after: Iterable[int] = (), version: str = "1") -> int:
        """Have it load; return the number of the message."""
        registry = engine(self._scheduler).registry
        deployment, found = registry.deployment(name), registry.version(name, version)
        cache = deployment.cache
        message: protocol.LoadMessage = {
            "op": protocol.LOAD,
            "name": name,
            "version": version,
            "load": next(_NUMBERS),
            "active": deployment.active,
            "digest": found.digest,
            "device": deployment.device,
            "resources": dict(deployment.resources) or None,
            "policy": asdict(found.policy),
            "cache": None if cache is None else cache.to_message(),
            "after": list(after),
            "again": False,
            "stimulus_id": "test",
        }
        self._scheduler.worker_send(self._worker.address, dict(message))
        return message["load"]

    async def answer(self, number: int) -> dict[str, Any]:
        """Wait for the answer to a message."""
        await until(lambda: number in self._answers)
        return self._answers[number]

    def has_answered(self, number: int) -> bool:
        """Whether the answer to a message has come."""
        return number in self._answers

    async def unloaded(self, name: str, **kwargs: Any) -> list[tuple[Any, ...]]:
        """Unload, and return what has been heard of it."""
        before = len(self.heard)
        await self.answer(self.unload(name, **kwargs))
        return self.heard[before:]

    async def loaded(self, name: str, **kwargs: Any) -> dict[str, Any]:
        """Load, and return the answer, which must tell of no failure."""
        answer = await self.answer(self.load(name, **kwargs))
        assert answer["failure"] is None, answer["failure"]
        return answer


def artifacts_asked_for(scheduler: Scheduler) -> Counter[str]:
    """Count the artifacts that workers ask for from now on, by name."""
    counts: Counter[str] = Counter()
    give = scheduler.handlers[protocol.ARTIFACT]

    def counted(name: str, **kwargs: Any) -> Any:
        counts[name] += 1
        return give(name=name, **kwargs)

    scheduler.handlers[protocol.ARTIFACT] = counted
    return counts
