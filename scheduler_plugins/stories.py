"""Tells what has happened to a request: what the engine, Dask and the workers know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from dask.typing import Key
from distributed.metrics import monotonic, time

from daskinfer import protocol
from daskinfer.exceptions import UnknownDeployment
from daskinfer.wording import counted
from scheduler_plugins import trail
from scheduler_plugins.trail import Attempt, Trail

if TYPE_CHECKING:
    from daskinfer.protocol import Recalled
    from scheduler_plugins.constraint import Constraint
    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.request import Request

#: Seconds that a worker may take to tell what it remembers.
_PATIENCE = 2.0
#: The latest attempts of which workers are asked.
_ATTEMPTS = 8

#: The fields of a :class:`daskinfer.story.StoryEntry`.
Entry: TypeAlias = "tuple[float, str, str, str, str]"

_ENGINE, _DASK = "engine", "dask"

_WAITS = {
    protocol.INPUTS: "for inputs from other workers",
    protocol.DEVICE: "for a task that holds the device",
    protocol.CACHE: "for the worker's cache",
}


class Stories:
    """Answers the call for a story; changes nothing.

    Parameters
    ----------
    plugin
        Whose requests they are.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin

    def __repr__(self) -> str:
        return f"<Stories by {self.plugin!r}>"

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        return {protocol.STORY: self.story}

    async def story(self, name: str, key: Key) -> dict[str, Any]:
        """Tell a request's life, as plain data."""
        found = self._find(key)
        if found is None:
            return {"status": "unknown"}
        own, life, request = found
        if own != name:
            return {"status": "other", "name": own}
        state, problem = self._state(life, request)
        offset = time() - monotonic()
        entries: list[Entry] = [
            (entry[0] + offset, *entry[1:])
            for event in life.events()
            for entry in _engine(event)
        ]
        entries += [
            (at, _DASK, f"{start} → {finish}", "", stimulus_id)
            for start, finish, stimulus_id, at in self.plugin.tasks.story(key)
            if at >= entries[0][0] - 1.0  # others of the key before are another story
        ]
        entries += await self._workers(life.attempts()[-_ATTEMPTS:])
        entries.sort(key=lambda entry: entry[0])
        if life.is_cut:
            told = "some events in the middle may be left out"
            entries.append((time(), _ENGINE, "cut", told, ""))
        return {
            "status": "OK",
            "key": key,
            "name": own,
            "state": state,
            "problem": problem,
            "entries": entries,
        }

    def _find(self, key: Key) -> tuple[str, Trail, Request | None] | None:
        request = self.plugin.requests.get(key)
        if request is not None:
            return request.name, request.trail, request
        found = self.plugin.lifecycle.past.find(key)
        return None if found is None else (*found, None)

    def _state(self, life: Trail, request: Request | None) -> tuple[str, str | None]:
        """How it is with a request now, and why it is not served."""
        _, what, about = life.events()[-1]
        if request is None or request.ended:
            end = what in (trail.FAILED, trail.CANCELLED)
            return (f"{what} ({about})" if end else what), None
        if request.batch is not None:
            batch = self.plugin.dispatcher.running.batches.get(request.batch)
            runs = batch is not None and batch.is_running
            return ("running" if runs else "sent"), None
        if request.delayed:
            return trail.HELD_BACK, None
        if request.waiting:
            return trail.QUEUED, self._problem(request)
        return "waiting for its inputs", None

    def _problem(self, request: Request) -> str | None:
        try:
            version = self.plugin.routing.version(request)
        except UnknownDeployment as error:
            return str(error)
        line = self.plugin.dispatcher.lines[request.name, version.version]
        constraint = cast("Constraint", request.constraint)
        return self.plugin.diagnosis.problem(line, constraint)

    async def _workers(self, attempts: list[Attempt]) -> list[Entry]:
        """What the workers remember that are there still."""
        batches: dict[str, list[str]] = {}
        for attempt in attempts:
            if self.plugin.tasks.has_worker(attempt.worker):
                batches.setdefault(attempt.worker, []).append(attempt.batch_id)

        async def ask(address: str) -> Any:
            call = self.plugin.tasks.rpc(address).daskinfer_recall
            return await asyncio.wait_for(call(batches=batches[address]), _PATIENCE)

        asked = [ask(address) for address in batches]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        now = time()
        return [
            entry
            for address, answer in zip(batches, answers, strict=True)
            if not isinstance(answer, BaseException)  # it is on its way out
            for entry in _recalled(address, answer, now)
        ]


def _engine(event: trail.Event) -> Iterator[Entry]:
    """An event of a trail, and what came of it, in monotonic seconds."""
    at, what, about = event
    if not isinstance(about, Attempt):
        told = f"for version {about!r}" if what == trail.QUEUED else about
        yield at, _ENGINE, what, told, ""
        return
    batch = f"batch {about.batch_id}"
    yield (
        *(at, _ENGINE, what),
        f"in {batch} to {about.worker}: version {about.version!r}, "
        f"{counted(about.requests, 'request')}, {counted(about.rows, 'row')}",
        f"daskinfer-run-{about.batch_id}",
    )
    for then, reason in about.waits or ():
        waits = "waits" if reason else "waits no longer"
        yield then, _ENGINE, waits, _WAITS.get(reason, ""), ""
    if about.ended is not None:
        yield (
            *(about.ended, _ENGINE, "done"),
            f"{batch} ran for {_milliseconds(about.ran)} on {about.device or 'nothing'}"
            f" in {counted(about.passes, 'pass', 'passes')}, after "
            f"{_milliseconds(about.waited)} on the worker",
            f"daskinfer-done-{about.batch_id}",
        )


def _recalled(address: str, answer: Iterable[Recalled], now: float) -> Iterator[Entry]:
    for told in answer:
        batch = f"batch {told['batch']}"
        yield now - told["came"], address, "came", batch, ""
        if told["began"] is not None:
            about = f"{batch} on {told['device']}"
            yield now - told["began"], address, "began", about, ""
        if told["ended"] is not None:
            yield now - told["ended"], address, "ended", batch, ""


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
