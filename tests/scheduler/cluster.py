"""A cluster without processes: the engine between clients and workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from daskinfer import BreakerPolicy, RetryPolicy, protocol
from daskinfer.exceptions import UnknownDeployment
from daskinfer.policy import BatchPolicy
from scheduler_plugins.deployment import Deployment, Version
from scheduler_plugins.diagnosis import Diagnosis
from scheduler_plugins.dispatcher import Dispatcher
from scheduler_plugins.health import Suspicion
from scheduler_plugins.lifecycle import Lifecycle
from scheduler_plugins.load import IN_FLIGHT
from scheduler_plugins.registry import Registry
from scheduler_plugins.request import Request
from scheduler_plugins.routing import Route, Routing
from tests.scheduler.bench import done_message
from tests.scheduler.memory import Memory
from tests.scheduler.tasks import ENDED, DaskTasks, Task

SECONDS = 0.01


class Cluster:
    """Workers run their batches one after the other, and answer when they are told to.

    Whatever is sent to them is checked: nobody overtakes, and nobody is sent too much.

    Parameters
    ----------
    kinds
        On which kind of device each deployment runs.
    policies
        How each deployment is batched.
    limits
        Seconds that a batch of each deployment may run.
    hung_after
        Seconds past that after which a worker is taken out.
    room
        How many models each worker has room for on a device.

    Attributes
    ----------
    batches
        What each worker in service has before it.
    fetching
        What each worker has whose inputs it waits for.
    strays
        What workers had when it was taken away from them.
    deadly
        Those under which a worker dies.
    """

    def __init__(
        self,
        kinds: Mapping[str, str],
        policies: Mapping[str, BatchPolicy],
        limits: Mapping[str, float | None],
        hung_after: float = math.inf,
        room: float = math.inf,
    ) -> None:
        self.kinds = kinds
        self.policies = policies
        self.limits = limits
        self.tasks = DaskTasks(self._moved)
        self.registry = Registry()
        self.requests: dict[int, Request] = {}
        self.batches: dict[str, list[Any]] = {}
        self.fetching: dict[str, list[Any]] = {}
        self.strays: list[tuple[str, Any]] = []
        self.deadly: set[Task] = set()
        self._dropped: set[tuple[str, int]] = set()
        self.dispatcher = Dispatcher(
            self.tasks,  # type: ignore[arg-type]
            self._send,
            lambda line: None,
            lambda keys: self.lifecycle.expire(keys),
            lambda address, reason: self.take_out(address),
            priority_age=1.0,
            warn_after=math.inf,
            suspicion=Suspicion(20, 1.0, hung_after),
            place=lambda request, line: self.lifecycle.place(request),
            swap=lambda lines, now: self.memory.swapping.check(lines, now),
        )
        self.memory = Memory(self, room)
        self.lifecycle = Lifecycle(
            self.tasks,  # type: ignore[arg-type]
            self.registry,
            Routing(self.registry),
            self.requests,  # type: ignore[arg-type]
            self.dispatcher,
            Diagnosis(self.registry, self.tasks),  # type: ignore[arg-type]
            asyncio.get_running_loop().call_soon,
        )

    # Clients

    def submit(self, request: Request, *, deadly: bool = False) -> None:
        task = self.tasks.create(request.key)
        if deadly:
            self.deadly.add(task)
        self.lifecycle.arrived(request)
        self.tasks.park(task)

    def deploy(self, name: str) -> None:
        deployment = Deployment(
            name,
            self.kinds[name],
            (),
            "least-loaded",
            Route("1"),
            RetryPolicy(max_attempts=3, backoff=0.05, max_backoff=0.1),
            batch_timeout=self.limits[name],
            breaker=BreakerPolicy(cooldown=0.5, max_cooldown=2),
        )
        version = Version(name, "1", "digest", policy=self.policies[name], nbytes=1)
        replicas = self.registry.add(deployment, version)
        self.dispatcher.lines.open(deployment, version)
        for replica in replicas:
            self.memory.load(version, replica)
        self.memory.swapping.assigned(version)

    def undeploy(self, name: str) -> None:
        deployment = self.registry.remove(name)
        self.memory.unloading.ask_all(deployment.versions["1"])
        waiting = self.dispatcher.close(name, "1")
        self.lifecycle.fail_waiting(waiting, UnknownDeployment(f"{name!r} is gone"))
        self.dispatcher.forget(name)

    def restart(self) -> None:
        for task in list(self.tasks.by_key.values()):
            self.tasks.forget(task)
        self.dispatcher.clear()
        self.lifecycle.clear()
        for address in self.batches:
            self._abandon(address)

    # Workers

    def join(self, address: str, doubt: str | None = None) -> None:
        """A worker comes, perhaps in place of one whose device is broken."""
        self.lose(address, expected=True)
        self.tasks.workers.append(address)
        self.batches[address], self.fetching[address] = [], []
        self.memory.join(address, doubt)

    def lose(self, address: str, *, expected: bool) -> None:
        if address in self.tasks.workers:
            self.batches.pop(address, None)
            self.fetching.pop(address, None)
            self.strays = [stray for stray in self.strays if stray[0] != address]
            self.tasks.lose(address)
            self.memory.lose(address)
            self.dispatcher.worker_lost(address, expected=expected)

    def take_out(self, address: str) -> None:
        """A worker's device is broken or hangs; its process is still there."""
        self._abandon(address)
        del self.batches[address], self.fetching[address]
        self.registry.device_failed(address, "broken", replaced=False)
        self.dispatcher.device_failed(address)

    def wanted(self, message: Any) -> list[int]:
        """The requests of a batch that its worker was not told to drop."""
        batch = message["batch"]
        return [key for key in message["keys"] if (batch, key) not in self._dropped]

    def fetch(self, address: str, index: int) -> None:
        """A batch waits for inputs: others run before it."""
        message = self.batches[address].pop(index)
        message["fetched"] = True
        self.fetching[address].append(message)
        self.dispatcher.progressed(message["batch"], address, protocol.INPUTS)

    def fetched(self, address: str) -> None:
        """A batch has its inputs, and begins."""
        message = self.fetching[address].pop(0)
        self.batches[address].insert(0, message)
        self.dispatcher.progressed(message["batch"], address, "")

    def hold(self, address: str) -> None:
        """A task has the device, and what is first waits for that."""
        batch = self.batches[address][0]["batch"]
        self.dispatcher.progressed(batch, address, protocol.DEVICE)

    def begin(self, address: str) -> None:
        """The first begins, whatever it waited for."""
        self.dispatcher.progressed(self.batches[address][0]["batch"], address, "")

    def answer(self, address: str, **about: Any) -> None:
        """A worker answers its first batch, or dies of it."""
        message = self.batches[address][0]
        wanted = self.wanted(message)
        tasks = zip(message["keys"], message["payloads"], strict=True)
        if any(key in wanted and task in self.deadly for key, task in tasks):
            self.lose(address, expected=False)
        else:
            self.say(address, self.batches[address].pop(0), **about)
            if not about:
                self._check_taken(message, wanted)

    def say(self, address: str, message: Any, **about: Any) -> None:
        """A worker answers a batch, whether anybody waits for that or not."""
        about = {"keys": self.wanted(message)} | about
        about["inputs"] = dict(zip(message["keys"], message["payloads"], strict=True))
        self.dispatcher.done(done_message(message, SECONDS) | about, address)

    def _abandon(self, address: str) -> None:
        for messages in (self.batches[address], self.fetching[address]):
            self.strays += [(address, message) for message in messages]
            messages.clear()

    # The engine

    def _moved(self, key: int, start: str, finish: str) -> None:
        """As the plugin's hook."""
        request = self.requests.get(key)
        if request is not None:
            self.lifecycle.moved(request, start, finish)

    def _send(self, address: str, message: Any) -> None:
        if message["op"] == protocol.DROP:
            self._dropped |= {(message["batch"], key) for key in message["keys"]}
            return
        self.memory.check_loaded(message["name"], address)
        sent = [self.requests[key] for key in message["keys"]]
        # Those in a group run isolated.
        message["alone"] = sent[0].group is not None
        self._check_new(address, sent)
        self.batches[address].append(message)
        self._check_turn(message["name"], sent)
        self._check_room(address)

    def _check_new(self, address: str, sent: Sequence[Request]) -> None:
        """No later attempt goes where the result of an earlier one may yet be.

        But where that had not begun: it is told in time that nobody wants it.
        """
        before = {
            task
            for batch in (*self.batches[address], *self.fetching[address])
            for key, task in zip(batch["keys"], batch["payloads"], strict=True)
            if not batch.get("fetched") or key in self.wanted(batch)
        }
        for request in sent:
            again = request.attempts > 1 and self.tasks.by_key[request.key] in before
            assert not again, f"{request} is sent to {address} twice"

    def _check_taken(self, message: Any, answered: Collection[int]) -> None:
        """Whoever still wanted an answer has it, also if it was given up."""
        for key, task in zip(message["keys"], message["payloads"], strict=True):
            if key in answered and self.tasks.by_key.get(key) is task:
                assert task.state in ENDED, f"{task} did not get its answer"

    def _check_turn(self, name: str, sent: Sequence[Request]) -> None:
        """Nobody who was sent has overtaken, and they fit into a batch."""
        last = max(request.order for request in sent)
        waiting = self.dispatcher.lines[name, "1"].queue.requests()
        behind = [request for request in waiting if request.lane == sent[0].lane]
        assert all(request.order >= last for request in behind), "out of turn"
        rows = sum(request.rows for request in sent)
        most = self.policies[name].max_batch_size
        assert len(sent) == 1 or rows <= most, "above the maximum"

    def _check_room(self, address: str) -> None:
        """One batch runs and one waits, unless somebody runs isolated."""
        batches = self.batches[address]
        if any(batch["alone"] for batch in batches):
            assert len(batches) == 1, f"{address} has another beside one isolated"
        assert len(batches) <= IN_FLIGHT, f"{address} is sent too much"
