"""Devices, a queue and a virtual clock around a policy."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Protocol

from benchmarks.sim.arrivals import Arrival, Lcg
from benchmarks.sim.curves import Shape
from benchmarks.sim.records import Batch, Device, Request, Result
from scheduler_plugins.batching import Send, Wait
from scheduler_plugins.load import DeviceLoad, Link

__all__ = ["Cluster", "Policy"]


class Policy(Protocol):
    """What the simulator asks of a policy: the interface of the real Batcher."""

    link: Link

    def arrived(self, rows: int, now: float) -> None: ...

    def decide(
        self,
        now: float,
        *,
        waiting: int,
        oldest: float,
        devices: Sequence[DeviceLoad],
    ) -> Send | Wait: ...

    def sent(self, send: Send, batch_id: str, now: float) -> None: ...

    def completed(
        self,
        batch_id: str,
        device: DeviceLoad,
        passes: Iterable[tuple[int, float]],
        now: float,
    ) -> None: ...

    def out_of_memory(
        self, batch_id: str, device: DeviceLoad, rows: int, now: float
    ) -> None: ...


class Cluster:
    """Runs a policy against arrivals.

    Parameters
    ----------
    shape : Shape
        What a batch costs.
    policy : callable
        Makes the policy of the devices.
    slowness : sequence of float
        One device each; devices of the same slowness are of one class.
    outbound, inbound : float
        Seconds of a message to a worker and back.
    jitter : float
        The outbound message takes up to this share more or less.
    noise : float
        Spread of the execution times (log-normal).
    change : callable, optional
        Device index and time to a factor on the execution time.
    out_of_memory : int, optional
        Batches with more rows than this fail.
    first_call : float
        Factor on the first batch of about a size on each device.
    one_class : bool
        The scheduler takes all devices for the same, whatever their slowness.
    seed : int
        Of noise and jitter.
    """

    def __init__(
        self,
        shape: Shape,
        policy: Callable[[Sequence[DeviceLoad]], Policy],
        slowness: Sequence[float] = (1.0,),
        *,
        outbound: float = 0.003,
        inbound: float = 0.002,
        jitter: float = 0.0,
        noise: float = 0.0,
        change: Callable[[int, float], float] | None = None,
        out_of_memory: int | None = None,
        first_call: float = 1.0,
        one_class: bool = False,
        seed: int = 1,
    ) -> None:
        self.shape = shape
        self.devices = [
            Device(
                DeviceLoad(f"device-{i}", "all" if one_class else f"x{slow:g}"), slow
            )
            for i, slow in enumerate(slowness)
        ]
        self._loads = [device.load for device in self.devices]
        self._by_load = {device.load: device for device in self.devices}
        self.policy = policy(self._loads)
        self._outbound, self._inbound, self._jitter = outbound, inbound, jitter
        self._noise, self._change = noise, change
        self._memory, self._first_call = out_of_memory, first_call
        self._random = Lcg(seed)
        self.now = 0.0
        self.waiting = 0
        self.queue: deque[Request] = deque()
        self.result = Result()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._names = count()
        self._alarm = float("inf")
        self._arrivals: Iterator[Arrival] = iter(())
        self._reissue = 0

    def run(self, arrivals: Iterable[Arrival], until: float = float("inf")) -> Result:
        """Serve `arrivals` and say how it went."""
        self._arrivals = iter(arrivals)
        self._next_arrival()
        return self._loop(until)

    def run_closed(self, callers: int, requests: int, think: float = 0.001) -> Result:
        """Serve `callers` that ask again (after a moment) once they are answered."""
        self._reissue = requests - callers
        self._think = think
        for _ in range(callers):
            self._at(self._random.uniform() * think, self._ask)
        return self._loop(float("inf"))

    def _loop(self, until: float) -> Result:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.result.unanswered = len(self.queue) + sum(
            len(batch.parts)
            for device in self.devices
            for batch in (*device.queue, device.running)
            if batch is not None
        )
        return self.result

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    # -- the scheduler

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            time, rows = arrival

            def arrive() -> None:
                self._queue(rows)
                self._next_arrival()

            self._at(time, arrive)

    def _ask(self) -> None:
        self._queue((1,))

    def _queue(self, rows: Sequence[int]) -> None:
        for row_count in rows:
            self.queue.append(Request(self.now, row_count, row_count, row_count))
        self.waiting += sum(rows)
        self.policy.arrived(sum(rows), self.now)
        self._decide()

    def _decide(self) -> None:
        while self.queue:
            decision = self.policy.decide(
                self.now,
                waiting=self.waiting,
                oldest=self.queue[0].arrived,
                devices=self._loads,
            )
            if isinstance(decision, Wait):
                if decision.until is not None:
                    self._wake(decision.until)
                return
            self._send(decision)

    def _wake(self, time: float) -> None:
        if not self.now < self._alarm <= time:
            self._alarm = time

            def wake() -> None:
                if self._alarm == self.now:
                    self._alarm = float("inf")
                self._decide()

            self._at(time, wake)

    def _send(self, send: Send) -> None:
        device = self._by_load[send.device]
        ends = None
        if device.running is not None and not device.queue:
            ends = device.running.started + device.running.seconds
        name = f"batch-{next(self._names)}"
        batch = Batch(name, device, 0, [], self.now, send.reason, send.probe, ends)
        while batch.rows < send.rows and self.queue:
            request = self.queue[0]
            rows = min(request.unsent, send.rows - batch.rows)
            request.unsent -= rows
            batch.rows += rows
            batch.parts.append((request, rows))
            if not request.unsent:
                self.queue.popleft()
        self.waiting -= batch.rows
        self.result.batches.append(batch)
        self.policy.sent(send, name, self.now)
        delay = self._outbound
        if self._jitter:
            delay *= 1 + self._jitter * (2 * self._random.uniform() - 1)
        self._at(self.now + delay, lambda: self._receive(batch))

    def _answer(self, batch: Batch) -> None:
        batch.answered = self.now
        if batch.failed:
            self._fail(batch)
        else:
            queued = batch.started - batch.received
            overhead = self.now - batch.sent - batch.seconds - queued
            self.policy.link.observe(overhead)
            batch.device.rows += batch.rows
            passes = [(batch.rows, batch.seconds)]
            self.policy.completed(batch.id, batch.device.load, passes, self.now)
            for request, rows in batch.parts:
                request.unanswered -= rows
                if not request.unanswered:
                    self.result.latencies.append(self.now - request.arrived)
                    self.result.answered.append(self.now)
                    if self._reissue > 0:
                        self._reissue -= 1
                        pause = self._random.exponential(self._think)
                        self._at(self.now + pause, self._ask)
        self._decide()

    def _fail(self, batch: Batch) -> None:
        self.result.failures += 1
        self.result.batches.remove(batch)
        for request, rows in reversed(batch.parts):
            if not request.unsent:
                self.queue.appendleft(request)
            request.unsent += rows
        self.waiting += batch.rows
        self.policy.out_of_memory(batch.id, batch.device.load, batch.rows, self.now)

    # -- the workers

    def _receive(self, batch: Batch) -> None:
        batch.received = self.now
        if batch.device.running is None:
            self._start(batch)
        else:
            batch.device.queue.append(batch)

    def _start(self, batch: Batch) -> None:
        device = batch.device
        device.running = batch
        batch.started = self.now
        batch.failed = self._memory is not None and batch.rows > self._memory
        seconds = self.shape.at(1 if batch.failed else batch.rows) * device.slowness
        if self._change is not None:
            seconds *= self._change(self.devices.index(device), self.now)
        if self._noise:
            seconds *= self._random.lognormal(self._noise)
        about = batch.rows.bit_length()
        if about not in device.called:
            device.called.add(about)
            seconds *= self._first_call
        batch.seconds = seconds
        self._at(self.now + seconds, lambda: self._end(batch))

    def _end(self, batch: Batch) -> None:
        device = batch.device
        device.running = None
        self._at(self.now + self._inbound, lambda: self._answer(batch))
        if device.queue:
            self._start(device.queue.popleft())
