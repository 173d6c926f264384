"""Dask's side of the requests, with the states that their tasks go through."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.scheduler.bench import Tasks

OPEN = ("no-worker", "processing")
ENDED = ("memory", "erred")


@dataclass(eq=False, slots=True)
class Task:
    """A task. Once it is forgotten, another one may have its key."""

    key: int
    state: str = "released"
    worker: str | None = None
    run_id: int = -1


class DaskTasks(Tasks):
    """Tasks that change state only as they do in a scheduler.

    Parameters
    ----------
    moved
        Called after each change: ``moved(key, start, finish)``.
    """

    def __init__(self, moved: Callable[[int, str, str], None]) -> None:
        super().__init__()
        self.workers = []
        self.by_key: dict[int, Task] = {}
        self._moved = moved
        self._run_ids = itertools.count()

    # What users and workers do

    def create(self, key: int) -> Task:
        """Add a task, which is yet to be parked."""
        task = self.by_key[key] = Task(key)
        return task

    def park(self, task: Task) -> None:
        """Let a task wait for a worker: a new one, or one that runs or has ended."""
        if task.state != "released":
            self._move(task, "released")
        self._move(task, "waiting")
        self._move(task, "no-worker")

    def forget(self, task: Task) -> None:
        """Nobody wants a task any more."""
        self._move(task, "released")
        del self.by_key[task.key]
        self._move(task, "forgotten")

    def lose(self, address: str) -> None:
        """A worker is gone: what it runs is parked again."""
        self.workers.remove(address)
        for task in list(self.by_key.values()):
            if task.state == "processing" and task.worker == address:
                self.park(task)

    def _move(self, task: Task, finish: str, worker: str | None = None) -> None:
        if finish in ENDED:
            assert task.state in OPEN, f"{task} ends twice"
        start, task.state, task.worker = task.state, finish, worker
        self._moved(task.key, start, finish)

    # What the engine asks

    def is_parked(self, key: int) -> bool:
        return self._has(key, "no-worker")

    def payload(self, key: int, pickle: Callable[[Any], Any]) -> Any:
        """The input tells whose it is."""
        return self.by_key[key]

    def dispatch(
        self, keys: Iterable[int], address: str, stimulus_id: str
    ) -> dict[int, int]:
        assert address in self.workers, f"a batch is sent to {address}, which is gone"
        run_ids = {}
        for key in keys:
            if self.is_parked(key):
                task = self.by_key[key]
                task.run_id = run_ids[key] = next(self._run_ids)
                self._move(task, "processing", address)
        return run_ids

    def release_running(self, keys: Iterable[int], stimulus_id: str) -> None:
        for key in keys:
            if self._has(key, "processing"):
                self.park(self.by_key[key])

    def adopt(
        self, keys: Iterable[int], address: str, stimulus_id: str
    ) -> dict[int, int]:
        wanted = [key for key in keys if self._has(key, *OPEN)]
        self.release_running(wanted, stimulus_id)
        return self.dispatch(wanted, address, stimulus_id)

    def complete(
        self, message: Any, run_ids: dict[int, int], address: str, *about: Any
    ) -> list[int]:
        completed = self._current(message["keys"], run_ids, address)
        for task in completed:
            assert message["inputs"][task.key] is task, f"{task} gets another's answer"
            self._move(task, "memory", address)
        return [task.key for task in completed]

    def fail_running(
        self, failures: Any, run_ids: dict[int, int], address: str, stimulus_id: str
    ) -> list[int]:
        failed = self._current(failures, run_ids, address)
        for task in failed:
            self._move(task, "erred")
        return [task.key for task in failed]

    def fail_parked(
        self, keys: Iterable[int], error: Exception, stimulus_id: str
    ) -> None:
        self.fail([key for key in keys if self.is_parked(key)], error, stimulus_id)

    def fail(self, keys: Iterable[int], error: Exception, stimulus_id: str) -> None:
        for key in keys:
            if self._has(key, *OPEN):
                self._move(self.by_key[key], "erred")

    def _has(self, key: int, *states: str) -> bool:
        return key in self.by_key and self.by_key[key].state in states

    def _current(
        self, keys: Iterable[int], run_ids: dict[int, int], address: str
    ) -> list[Task]:
        """The tasks of those attempts that count."""
        return [
            task
            for key in keys
            if self._has(key, "processing")
            and (task := self.by_key[key]).run_id == run_ids.get(key)
            and task.worker == address
        ]
