"""A dispatcher with a stand-in for Dask's side of the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from daskinfer import protocol
from daskinfer.caching import CachePolicy
from daskinfer.policy import BatchPolicy
from scheduler_plugins.constraint import ANYWHERE, Constraint
from scheduler_plugins.deployment import Deployment, Version
from scheduler_plugins.dispatcher import Dispatcher
from scheduler_plugins.health import Suspicion
from scheduler_plugins.line import Line
from scheduler_plugins.request import Request
from scheduler_plugins.routing import Route

A, B = "tcp://a:1", "tcp://b:1"
NOWHERE = Constraint(workers=frozenset({"tcp://gone:1"}))

NEVER = Suspicion(factor=1.0, after=float("inf"))


class Tasks:
    """What the dispatcher asks of Dask, from memory."""

    bandwidth = 1e8

    def __init__(self) -> None:
        self.workers = [A, B]
        self.paused: set[str] = set()
        self.run_ids: dict[Any, int] = {}
        self.retries: dict[Any, int] = {}
        self.unpicklable: set[Any] = set()
        self.gone: set[Any] = set()
        self.failed: dict[Any, Any] = {}
        self.completed: list[tuple[Any, dict[Any, int]]] = []
        self.released: list[Any] = []
        self.adopted: list[Any] = []
        self.bytes_away_from: dict[str, int] = {}
        self.told: list[tuple[str, Any]] = []
        #: What Dask's transitions make the plugin do when a task is parked again.
        self.parked: Callable[[Any], None] = lambda key: None
        #: ... and when it has failed.
        self.erred: Callable[[Any], None] = lambda key: None

    def running(self) -> list[str]:
        return [address for address in self.workers if address not in self.paused]

    def admits(self, constraint: Constraint, address: str) -> bool:
        return constraint.workers is None or address in constraint.workers

    def declares(self, address: str, resources: Any) -> bool:
        return True

    def has_worker(self, address: str) -> bool:
        return address in self.workers

    def is_current(self, key: Any, address: str, run_id: int) -> bool:
        return self.run_ids.get(key) == run_id

    def tell(self, client: str, message: Any) -> None:
        self.told.append((client, message))

    def is_parked(self, key: Any) -> bool:
        return key not in self.gone

    def spend_retry(self, key: Any) -> bool:
        left = self.retries.get(key, 0)
        self.retries[key] = left - 1
        return left > 0

    def home(self, key: Any, at_least: float) -> str | None:
        return None

    def missing_bytes(self, key: Any, address: str) -> int:
        return self.bytes_away_from.get(address, 0)

    def dispatch(self, keys: Any, address: str, stimulus_id: str) -> dict[Any, int]:
        found = [key for key in keys if key not in self.gone]
        for key in found:
            self.run_ids[key] = self.run_ids.get(key, 0) + 1
        return {key: self.run_ids[key] for key in found}

    def payload(self, key: Any, pickle: Callable[[Any], Any]) -> bytes:
        if key in self.unpicklable:
            raise TypeError(f"cannot pickle {key}")
        return b"input"

    def who_has(self, keys: Any) -> dict[Any, list[str]]:
        return {}

    def fail_running(self, failures: Any, *args: Any) -> list[Any]:
        self.failed |= failures
        return list(failures)

    def fail_parked(self, keys: Any, error: Exception, stimulus_id: str) -> None:
        self.failed |= dict.fromkeys(keys, error)
        for key in keys:
            self.erred(key)

    def fail(self, keys: Any, error: Exception, stimulus_id: str) -> None:
        self.fail_parked(keys, error, stimulus_id)

    def complete(self, message: Any, run_ids: Any, *args: Any) -> list[Any]:
        self.completed.append((message, run_ids))
        return list(message["keys"])

    def release_running(self, keys: Any, stimulus_id: str) -> None:
        self.released += keys
        for key in keys:
            self.parked(key)

    def park_running(self, keys: Any, stimulus_id: str) -> None:
        self.release_running(keys, stimulus_id)

    def adopt(self, keys: Any, address: str, stimulus_id: str) -> dict[Any, int]:
        self.adopted += keys
        return self.dispatch(keys, address, stimulus_id)


class Bench:
    """A dispatcher, what it sent, and a way to answer."""

    def __init__(
        self,
        warn_after: float = float("inf"),
        suspicion: Suspicion = NEVER,
        place: Callable[[Request, Line], Line | None] = lambda request, line: line,
    ) -> None:
        self.tasks = Tasks()
        self.sent: list[tuple[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.reported: list[Line] = []
        self.late: list[Any] = []
        self.hung: list[tuple[str, str]] = []
        #: What a test has noted as answered.
        self.answered: list[Any] = []
        self.dispatcher = Dispatcher(
            self.tasks,  # type: ignore[arg-type]
            lambda address, message: self.sent.append((address, message)),
            self.reported.append,
            self.late.extend,
            lambda address, reason: self.hung.append((address, reason)),
            priority_age=1.0,
            warn_after=warn_after,
            suspicion=suspicion,
            place=place,
        )
        self.requests: dict[Any, tuple[Request, Line]] = {}

    def open(
        self,
        name: str = "m",
        seconds: float = 10.0,
        workers: tuple[str, ...] = (A,),
        policy: BatchPolicy | None = None,
        timings: list[tuple[int, float]] | None = None,
        placement: str = "least-loaded",
        cache: CachePolicy | None = None,
    ) -> Line:
        """A deployment whose batches take the same time at every size."""
        self.seconds[name] = seconds
        policy = policy or BatchPolicy()
        wanted = Deployment(name, "cpu", (), placement, Route("1"), cache=cache)
        version = Version(name, "1", "digest", policy=policy)
        self.dispatcher.lines.open(wanted, version)
        if timings is None:
            timings = [(1, seconds), (policy.max_batch_size, seconds)]
        for address in workers:
            self.dispatcher.device_ready(name, "1", address, "cpu", timings)
        return self.dispatcher.lines[name, "1"]

    def enqueue(self, line: Line, *keys: Any, **about: Any) -> list[Request]:
        about = {"arrived": 0.0, "signature": "x", "constraint": ANYWHERE} | about
        made = [Request(key, line.name, None, **about) for key in keys]
        for request in made:
            self.requests[request.key] = request, line
            self.dispatcher.waiting.enqueue(request, line)
        return made

    def follow(self) -> Bench:
        """Let requests that are parked again, or fail, behave as in a cluster."""
        self.tasks.parked = self._parked
        self.tasks.erred = self._erred
        return self

    def _parked(self, key: Any) -> None:
        request, line = self.requests[key]
        self.dispatcher.unassign(request)
        self.dispatcher.waiting.enqueue(request, line)

    def _erred(self, key: Any) -> None:
        request, _ = self.requests[key]
        self.dispatcher.waiting.discard(request)
        self.dispatcher.unassign(request)

    def lose(self, address: str, *, expected: bool = False) -> list[Any]:
        """A worker is gone; return the keys that wait again."""
        self.tasks.workers = [w for w in self.tasks.workers if w != address]
        back = []
        for batch in list(self.dispatcher.running.batches.values()):
            if batch.device.name == address:
                # What Dask's transitions make the plugin do.
                for request in list(batch.requests.values()):
                    self.dispatcher.unassign(request)
                    self.dispatcher.waiting.enqueue(request, batch.line)
                    back.append(request.key)
        self.dispatcher.worker_lost(address, expected=expected)
        # What has failed is discarded by the transition hook.
        for line in self.dispatcher.lines.values():
            for request in line.queue.requests():
                if request.key in self.tasks.failed:
                    self.dispatcher.waiting.discard(request)
        return back

    def join(self, address: str, name: str = "m") -> None:
        """A worker comes that is as fast as the others."""
        self.tasks.workers = [*self.tasks.workers, address]
        timings = [(1, self.seconds[name]), (64, self.seconds[name])]
        self.dispatcher.device_ready(name, "1", address, "cpu", timings)

    @property
    def batches(self) -> list[tuple[str, list[Any]]]:
        """Worker and keys of each batch sent, in order."""
        return [(address, message["keys"]) for address, message in self.runs]

    @property
    def runs(self) -> list[tuple[str, Any]]:
        """Worker and message of each batch sent, in order."""
        return [(a, m) for a, m in self.sent if m["op"] == protocol.RUN]

    def answer(self, index: int = -1, **about: Any) -> None:
        """Answer a batch that was sent."""
        address, message = self.runs[index]
        seconds = self.seconds[message["name"]]
        self.dispatcher.done(done_message(message, seconds) | about, address)

    def not_found(self, index: int, dropped: bytes = b"") -> None:
        """A worker says that a batch is not in its cache."""
        address, message = self.runs[index]
        self.dispatcher.not_found(message["batch"], address, dropped)

    def progress(self, index: int, waits_for: str) -> None:
        """A worker says what a batch waits for but its turn, or that it has begun."""
        address, message = self.runs[index]
        self.dispatcher.progressed(message["batch"], address, waits_for)


def done_message(message: Any, seconds: float) -> Any:
    """What a worker says when it has run all of a batch, one row each, in one pass."""
    rows = len(message["keys"])
    return {
        "batch": message["batch"],
        "keys": message["keys"],
        "failed": {},
        "missing": [],
        "out_of_memory": 0,
        "streaming": [],
        "cached": [],
        "look_up": 0.0,
        "kept": b"",
        "passes": [
            {"rows": rows, "padded": rows, "requests": rows, "seconds": seconds}
        ],
        "waited": 0.0,
        "ran": seconds,
        "device": "cpu",
        "struck": [],
        "broken": "",
        "stimulus_id": "done",
    }


async def settle() -> None:
    """Let the dispatcher decide."""
    for _ in range(3):
        await asyncio.sleep(0)


async def come(condition: Callable[[], Any]) -> None:
    """Wait until the dispatcher's own timer has made something so."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never came")
