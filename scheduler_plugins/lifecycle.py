"""What happens to a request between its arrival and its end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from dask.typing import Key
from distributed.metrics import monotonic

from daskinfer.exceptions import (
    DeadlineExceeded,
    NoReadyWorker,
    Overloaded,
    UnknownDeployment,
)
from daskinfer.wording import counted
from scheduler_plugins.outcomes import (
    CACHED,
    COMPUTED,
    DASK,
    REFUSED,
    RELEASED,
    RESTARTED,
    cause_of,
)
from scheduler_plugins.trail import SUBMITTED, Past, Trail

if TYPE_CHECKING:
    from daskinfer.exceptions import InferenceError
    from scheduler_plugins.constraint import Constraint
    from scheduler_plugins.diagnosis import Diagnosis
    from scheduler_plugins.dispatcher import Dispatcher
    from scheduler_plugins.line import Line
    from scheduler_plugins.registry import Registry
    from scheduler_plugins.request import Request
    from scheduler_plugins.routing import Routing
    from scheduler_plugins.taskstate import TaskStates

_STIMULUS = "daskinfer"
#: What Dask's logs call the end of requests whose deadline has come.
EXPIRED = "daskinfer-expired"


class Lifecycle:
    """Lets requests wait, turns them away, and ends them in time.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    registry
        What is deployed.
    routing
        Tells which version answers a request.
    requests
        Every request whose task exists.
    dispatcher
        Has them run.
    diagnosis
        Knows why one is not served.
    call_soon
        Calls a function on the event loop, after the transition at hand.

    Attributes
    ----------
    doomed
        Requests that are about to fail, each with its ``error``.
    past
        What happened to those whose tasks are gone.
    """

    def __init__(
        self,
        tasks: TaskStates,
        registry: Registry,
        routing: Routing,
        requests: dict[Key, Request],
        dispatcher: Dispatcher,
        diagnosis: Diagnosis,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.doomed: list[Request] = []
        self.past = Past()
        self._tasks = tasks
        self._registry = registry
        self._routing = routing
        self._requests = requests
        self._dispatcher = dispatcher
        self._diagnosis = diagnosis
        self._call_soon = call_soon

    def __repr__(self) -> str:
        return f"<Lifecycle requests: {len(self._requests)}>"

    def clear(self) -> None:
        """Forget all requests."""
        for request in self._requests.values():
            if not request.ended:
                self._cancel(request, RESTARTED)
            self.past.add(request.key, request.name, request.trail)
        self._requests.clear()
        self.doomed.clear()

    def knows(self, key: Key) -> bool:
        """Whether a key is that of a request."""
        return key in self._requests

    def arrived(self, request: Request) -> None:
        """A request is there; it may have to wait for its inputs first."""
        self._requests[request.key] = request
        inputs = "it needs results of other tasks" if request.has_dependencies else ""
        request.trail.note(request.arrived, SUBMITTED, inputs)
        request.arrived_at(self._dispatcher.statistics.get(request.name))
        self._set_deadline(request)

    def moved(self, request: Request, start: str, finish: str) -> None:
        """Dask has moved a request's task from one state to another."""
        dispatcher = self._dispatcher
        dispatcher.waiting.discard(request)
        if request.batch is not None and start == "processing":
            dispatcher.unassign(request)
        if finish in ("waiting", "no-worker") and request.ended:
            request.renew(monotonic())
            self._set_deadline(request)
        if finish == "no-worker":
            self._wait(request)
        elif finish in ("memory", "erred"):
            self._end(request, succeeded=finish == "memory")
        elif finish == "forgotten":
            del self._requests[request.key]
            request.forgotten = True
            if not request.ended:
                dispatcher.deadlines.discard(request.key)
                self._cancel(request, RELEASED)
            self.past.add(request.key, request.name, request.trail)

    # Waiting

    def _wait(self, request: Request) -> None:
        try:
            if request.error is not None:
                raise request.error
            if request.has_dependencies and self._routing.has_switched:
                upstream = self._tasks.upstream(request.key, self._requests)
                self._routing.follow(request, upstream)
            line = self._line_of(request)
            if not request.dispatched:
                self._turn_away_above_limit(request, line)
        except Exception as error:
            self._doom(request, error)
        else:
            if request.counts is not line.counts:
                # It outlived the deployment it was sent to; this one serves it now.
                request.arrived_at(line.counts)
            self._dispatcher.waiting.enqueue(request, line)

    def place(self, request: Request) -> Line | None:
        """Find where a request belongs by now that waits; None: it will fail."""
        try:
            return self._line_of(request)
        except UnknownDeployment as error:
            self._doom(request, error)
            return None

    def _doom(self, request: Request, error: Exception) -> None:
        request.error, request.cause = error, cause_of(type(error))
        self.doomed.append(request)
        if len(self.doomed) == 1:
            # Not from within a transition of the same task.
            self._call_soon(self._fail_doomed)

    def _line_of(self, request: Request) -> Line:
        version = self._routing.version(request)
        return self._dispatcher.lines[request.name, version.version]

    def _turn_away_above_limit(self, request: Request, line: Line) -> None:
        limit = line.max_queue
        if limit is not None and self._dispatcher.lines.waiting(request.name) >= limit:
            raise Overloaded(
                f"{request.name!r} has {counted(limit, 'request')} waiting, as many as "
                "max_queue allows: send this one again later, or add workers",
                name=request.name,
                version=line.version,
                attempts=request.attempts,
            )

    # The end

    def _end(self, request: Request, *, succeeded: bool) -> None:
        request.ended = True
        self._dispatcher.deadlines.discard(request.key)
        now = monotonic()
        if succeeded:
            self._note(request, CACHED if request.was_cached else COMPUTED, now)
        else:
            self._note(request, ("failed", request.cause or DASK), now)
        counts, figures = request.counts, request.figures
        if counts is None:
            return
        if succeeded:
            counts.succeeded([now - request.arrived], now)
        else:
            counts.failures += 1
        if figures is not None:
            if succeeded:
                figures.succeeded(None if request.was_cached else now - request.arrived)
                figures.measures.answered(
                    request.dispatched - request.arrived, now - request.arrived
                )
            else:
                figures.failed()

    def _cancel(self, request: Request, how: tuple[str, str]) -> None:
        self._note(request, how, monotonic())
        if request.counts is not None:
            request.counts.cancelled += 1

    def _note(self, request: Request, how: tuple[str, str], now: float) -> None:
        request.trail.note(now, *how)
        counts = request.counts
        lines = self._dispatcher.lines
        outcomes = lines.elsewhere if counts is None else counts.outcomes
        outcomes[how] += 1

    def refused(self, name: object, keys: Iterable[Key]) -> None:
        """Requests of a message that could not be read; most never became any."""
        keys = list(keys)
        for key in keys:
            if key not in self._requests:
                trail = Trail()
                trail.note(monotonic(), *REFUSED)
                self.past.add(key, str(name), trail)
        count = sum(key not in self._requests for key in keys)
        lines = self._dispatcher.lines
        counts = lines.statistics.get(name) if isinstance(name, str) else None
        if counts is not None:
            counts.arrived(count)
            counts.failures += count
        (lines.elsewhere if counts is None else counts.outcomes)[REFUSED] += count

    def _fail_doomed(self) -> None:
        doomed, self.doomed = self.doomed, []
        failing: list[tuple[Key, Exception]] = []
        for request in doomed:
            if request.error is not None and not request.forgotten:
                failing.append((request.key, request.error))
                # A retry of the user's shall find out anew.
                request.error = None
        for keys, error in _alike(failing):
            self._tasks.fail_parked(keys, error, _STIMULUS)

    def fail_waiting(self, requests: list[Request], error: InferenceError) -> None:
        """Fail requests that can never be served."""
        for request in requests:
            request.cause = cause_of(type(error))
        self._tasks.fail_parked([r.key for r in requests], error, _STIMULUS)

    # Deadlines

    def _set_deadline(self, request: Request) -> None:
        if request.timeout is not None:
            at = request.arrived + request.timeout
            self._dispatcher.watch(request.key, at)

    def expire(self, keys: list[Key]) -> None:
        """The deadline of requests has come: they fail wherever they are."""
        # Those who ask for the same workers have the same problem.
        problem = functools.cache(self._diagnosis.problem)
        late = [(key, self._too_late(self._requests[key], problem)) for key in keys]
        for key, too_late in late:
            self._requests[key].cause = cause_of(type(too_late))
        for group, error in _alike(late):
            self._tasks.fail(group, error, EXPIRED)

    def _too_late(
        self,
        request: Request,
        problem: Callable[[Line, Constraint], str | None],
    ) -> DeadlineExceeded:
        passed = f"the timeout of {request.timeout:g} s for {request.name!r} has passed"
        advice = "allow more time, or add workers"
        about: dict[str, Any] = {"name": request.name, "attempts": request.attempts}
        batch = self._dispatcher.running.batches.get(request.batch or "")
        if batch is not None:
            worker = batch.device.name
            about |= {"version": batch.line.version, "worker": worker}
            doing = "it ran" if batch.is_running else "it waited for its turn"
            return DeadlineExceeded(
                f"{passed} while {doing} on {worker}: {advice}", **about
            )
        stream = self._dispatcher.streams.live.find(request.batch, request.key)
        if stream is not None:
            about |= {"version": stream.line.version, "worker": stream.device.name}
            chunks = counted(request.delivered, "chunk")
            return DeadlineExceeded(
                f"{passed} while it streamed from {stream.device.name}, after {chunks}",
                **about,
                chunks=request.delivered,
            )
        if not (request.waiting or request.delayed):
            told = f"{passed} while its inputs were computed: {advice}"
            return DeadlineExceeded(told, **about)
        line = self._line_of(request)
        about["version"] = line.version
        why = problem(line, cast("Constraint", request.constraint))
        if why is not None:
            return NoReadyWorker(f"{passed}: {why}", **about)
        return DeadlineExceeded(
            f"{passed} while it waited in the queue: {advice}", **about
        )


def _alike(
    failing: Iterable[tuple[Key, Exception]],
) -> Iterable[tuple[list[Key], Exception]]:
    """Requests that fail for the same reason share one exception: it is pickled."""
    groups: dict[tuple[type, str], tuple[list[Key], Exception]] = {}
    for key, error in failing:
        kind = (type(error), repr(error.args) + repr(vars(error)))
        groups.setdefault(kind, ([], error))[0].append(key)
    return groups.values()
