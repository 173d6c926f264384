"""Whatever happens, in whatever order: every request ends once, and in its turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer import BreakerPolicy, RetryPolicy
from daskinfer.exceptions import BatchTimeout, WorkerLost
from daskinfer.policy import BatchPolicy
from scheduler_plugins.health import Health, Suspicion
from scheduler_plugins.line import Batch, Line
from scheduler_plugins.queueing import Lane, Request
from tests.scheduler import virtual
from tests.scheduler.bench import NEVER, Bench, settle

MAX_ROWS = 6
FAILURE = {"exception_text": "the model's own"}
SECONDS = 0.05

ARRIVE = st.tuples(
    st.just("arrive"),
    st.integers(1, 12),  # requests
    st.integers(1, 4),  # rows of each
    st.sampled_from([0.0, 5.0]),  # priority
    st.sampled_from(["x", "y"]),  # signature
    st.booleans(),  # whether one of them is deadly
)
OTHERS = st.tuples(
    st.sampled_from(["answer", "answer", "refuse", "time out", "lose", "retire"])
    | st.sampled_from(["join", "cancel", "pause", "resume", "pass", "break"]),
    st.integers(0, 30),
)
STEPS = st.lists(ARRIVE | OTHERS, min_size=1, max_size=40)
LINES = ("m", "n")


class World:
    """Two deployments on the same devices, and what may happen to them."""

    def __init__(
        self, suspicion: Suspicion = NEVER, batch_timeout: float | None = None
    ) -> None:
        self.bench = Bench(suspicion=suspicion).follow()
        self.tasks = self.bench.tasks
        self.tasks.workers = []
        self.tasks.adopt = self.adopt  # type: ignore[method-assign]
        self.adopted: list[int] = []
        self.lines = []
        for name in LINES:
            line = self.bench.open(
                name, SECONDS, workers=(), policy=BatchPolicy(max_batch_size=MAX_ROWS)
            )
            line.retry = RetryPolicy(max_attempts=3, backoff=0.01)
            line.health = Health(BreakerPolicy(cooldown=0.1, max_cooldown=0.5))
            line.batch_timeout = batch_timeout
            batch_timeout = None  # the other's batches make their worker suspect
            self.lines.append(line)
        self.everybody: dict[int, Request] = {}
        self.deadly: set[int] = set()
        self.ends: Counter[int] = Counter()
        self.answered: set[int] = set()
        self.cancelled: set[int] = set()
        self.born = 0
        for line in self.lines:
            self._watch_turns(line)
        for _ in range(2):
            self.join()

    def _watch_turns(self, line: Line) -> None:
        take = line.queue.take

        def in_turn(lane: Lane, rows: int) -> list[Request]:
            taken = take(lane, rows)
            last = max(request.order for request in taken)
            assert all(r.order >= last for r in lane.requests()), "out of turn"
            total = sum(request.rows for request in taken)
            assert len(taken) == 1 or total <= MAX_ROWS, "above the maximum"
            return taken

        # The queue has slots: a stand-in passes everything else on.
        class Watched(type(line.queue)):  # type: ignore[misc]
            __slots__ = ()

            def take(self, lane: Lane, rows: int) -> list[Request]:
                return in_turn(lane, rows)

        line.queue.__class__ = Watched

    # What happens

    def arrive(
        self, count: int, rows: int, priority: float, signature: str, deadly: bool
    ) -> None:
        line = self.lines[count % 2]
        now = asyncio.get_running_loop().time()
        keys = [len(self.everybody) + i for i in range(count)]
        made = self.bench.enqueue(
            line,
            *keys,
            rows=rows,
            priority=priority,
            signature=signature,
            arrived=now,
        )
        self.everybody.update((request.key, request) for request in made)
        if deadly:
            self.deadly.add(keys[count // 2])

    def running(self) -> list[Batch]:
        """The batch that each device runs now."""
        first: dict[str, Batch] = {}
        for batch in self.bench.dispatcher.running.batches.values():
            first.setdefault(batch.device.name, batch)
        return list(first.values())

    def step(self, what: str, number: int) -> None:
        running = self.running()
        if what in ("answer", "refuse", "time out"):
            if running:
                batch = running[number % len(running)]
                if self.deadly & {*batch.requests, *batch.given_up}:
                    self.lose(batch.device.name)
                elif what == "answer":
                    self.answer(batch)
                elif what == "refuse":
                    self.refuse(batch)
                else:
                    self.time_out(batch)
        elif what == "break":
            if running:
                self.break_device(running[number % len(running)], number)
        elif what in ("lose", "retire"):
            workers = self.tasks.workers
            if workers:
                address = workers[number % len(workers)]
                self.lose(address, expected=what == "retire")
        elif what == "join":
            self.join()
        elif what == "pause":
            self.tasks.paused |= set(self.tasks.workers[number % 3 :])
        elif what == "resume":
            self.resume()
        elif what == "cancel":
            self.cancel(number)

    def join(self, doubt: str | None = None) -> None:
        self.born += 1
        address = f"tcp://worker-{self.born}:1"
        self.tasks.workers = [*self.tasks.workers, address]
        timings = [(1, SECONDS), (MAX_ROWS, SECONDS)]
        for name in LINES:
            self.bench.dispatcher.device_ready(
                name, "1", address, "cpu", timings, doubt
            )

    def resume(self) -> None:
        self.tasks.paused.clear()
        self.bench.dispatcher.wake()

    def lose(self, address: str, expected: bool = False) -> None:
        self.bench.lose(address, expected=expected)
        self._note_failures()

    def answer(self, batch: Batch, **about: Any) -> None:
        index = [m["batch"] for _, m in self.bench.runs].index(batch.batch_id)
        wanted = list(batch.requests)
        failed = about.get("failed", {})
        self.bench.answer(index, **about)
        for key in wanted:
            if key not in failed:
                self.answered.add(key)
                self.ends[key] += 1
        for key in self.adopted:
            self.answered.add(key)
            self.ends[key] += 1
        self.adopted.clear()

    def adopt(self, keys: list[int], address: str, stimulus_id: str) -> dict[int, int]:
        """Late results: whoever runs or waits for another attempt does so no more."""
        self._note_failures()
        wanted = [key for key in keys if not self.ends[key]]
        for key in wanted:
            self.bench.dispatcher.unassign(self.everybody[key])
            self.bench.dispatcher.discard(self.everybody[key])
        self.adopted += wanted
        return self.tasks.dispatch(wanted, address, stimulus_id)

    def refuse(self, batch: Batch) -> None:
        """The model raises for one of them, for good."""
        first = next(iter(batch.requests), None)
        if first is not None:
            self.answer(batch, failed={first: FAILURE})
            self._note_failures()

    def time_out(self, batch: Batch) -> None:
        """A batch is given up; its requests are charged each for itself."""
        dispatcher, line = self.bench.dispatcher, batch.line
        requests = list(batch.requests.values())
        for request in requests:
            dispatcher.unassign(request)
            dispatcher.enqueue(request, line)
            dispatcher.recovery.attempt_failed(
                request, line, BatchTimeout, batch.device.name
            )
            self._note_failures()
        # The worker says later that there was nothing left to do.
        self.answer(batch, keys=[], passes=[])

    def break_device(self, batch: Batch, number: int) -> None:
        """Some of a batch are in the pass that breaks the device."""
        index = [m["batch"] for _, m in self.bench.runs].index(batch.batch_id)
        address = batch.device.name
        struck = [*batch.requests, *batch.given_up][: 1 + number % 4]
        self.bench.answer(index, keys=[], passes=[], struck=struck, broken="broken")
        self.bench.dispatcher.device_failed(address)
        self.check()
        # Its process ends on purpose; another comes in its place.
        self.lose(address, expected=True)
        self.join("its process is new")

    def cancel(self, number: int) -> None:
        open_ones = [r for r in self.everybody.values() if not self.ends[r.key]]
        if open_ones:
            request = open_ones[number % len(open_ones)]
            self.bench.dispatcher.discard(request)
            self.bench.dispatcher.unassign(request)
            self.cancelled.add(request.key)
            self.ends[request.key] += 1

    def _note_failures(self) -> None:
        for key in self.tasks.failed:
            if not self.ends[key]:
                self.ends[key] += 1

    # What must hold

    def check(self) -> None:
        self._note_failures()
        dispatcher = self.bench.dispatcher
        for request in self.everybody.values():
            places = [
                request.waiting,
                request.delayed,
                request.batch is not None,
                bool(self.ends[request.key]),
            ]
            assert sum(places) == 1, (request, places)
        for line in self.lines:
            waiting = line.queue.requests()
            assert line.queue.count == len(waiting)
            assert line.queue.rows == sum(request.rows for request in waiting)
            assert line.delayed == len(dispatcher.recovery.held(line))

    def nobody_waits_in_vain(self) -> None:
        """Called after a time in which nothing happened but the engine's timers."""
        dispatcher = self.bench.dispatcher
        running = self.tasks.running()
        for line in self.lines:
            ready = [d for d in line.devices.values() if d.name in running]
            for lane in line.queue.oldest(100):
                # One that has failed it is no help while there is another.
                allowed = dispatcher._admission.devices(lane, ready, ready)
                idle = [device for device in allowed if device.idle]
                assert not idle, f"{lane} waits while {idle} idle"

    def all_ended(self) -> bool:
        return self.ends.keys() >= self.everybody.keys()

    def end(self) -> None:
        dispatcher = self.bench.dispatcher
        assert all(count == 1 for count in self.ends.values())
        assert self.ends.keys() == self.everybody.keys()
        lost = {
            key for key, error in self.tasks.failed.items() if type(error) is WorkerLost
        }
        assert self.deadly <= lost | self.cancelled | self.tasks.failed.keys()
        assert not self.deadly & self.answered
        assert not dispatcher.running.batches and not dispatcher.running.unwanted
        assert not len(dispatcher.recovery.delayed)
        assert not any(line.in_flight or line.delayed for line in self.lines)
        assert all(d.idle for line in self.lines for d in line.devices.values())


async def live(steps: list[Any], world: World, pause: float = 60) -> None:
    for step in steps:
        if step[0] == "arrive":
            world.arrive(*step[1:])
        elif step[0] == "pass":
            await asyncio.sleep(step[1] / 100)
        else:
            world.step(*step)
        await settle()
        world.check()
    # From now on nothing bad happens any more, but for the deadly ones.
    world.resume()
    world.join()
    for _ in range(3000):
        await asyncio.sleep(pause)
        await settle()
        world.check()
        if pause > 1:  # longer than anything is held back
            world.nobody_waits_in_vain()
        if not world.running() and world.all_ended():
            break
        world.step("answer", 0)
        if not world.tasks.workers:
            world.join()
        await settle()
    await asyncio.sleep(60)
    world.bench.dispatcher.wake()
    await settle()
    world.check()
    world.end()


@settings(deadline=None, max_examples=150)
@given(STEPS)
def test_every_request_ends_once_whatever_happens(steps):
    async def go() -> None:
        await live(steps, World())

    virtual.run(go())


@settings(deadline=None, max_examples=150)
@given(STEPS)
def test_also_where_batches_are_late(steps):
    """Time passes while devices say nothing, and some do so in the end."""

    async def go() -> None:
        world = World(Suspicion(factor=1.0, after=0.15), batch_timeout=0.1)
        await live(steps, world, pause=0.06)

    virtual.run(go())
