"""What may happen to a cluster, at any time."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import Any

from daskinfer.policy import BatchPolicy
from scheduler_plugins.constraint import ANYWHERE, Constraint
from scheduler_plugins.request import Request
from tests.scheduler.cluster import Cluster
from tests.scheduler.tasks import ENDED, Task

ADDRESSES = ["tcp://a:1", "tcp://b:1", "tcp://c:1"]
NAMES = ["x", "y"]
FAILURE = {"exception_text": "the model's own"}


class World:
    """A cluster with two deployments, and the events of its life.

    All that is random comes from the seed, so that a seed tells the whole story.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.addresses = ADDRESSES[: pick([1, 2, 2, 3])]
        self.cluster = Cluster(
            kinds={"x": "cpu", "y": pick(["cpu", "npu"])},
            policies={n: BatchPolicy(max_batch_size=pick([1, 4, 16])) for n in NAMES},
            # The longer one is past the time after which a device is suspect.
            limits={"x": 0.3, "y": pick([0.3, 5.0])},
            hung_after=pick([3.0, math.inf]),
            room=pick([math.inf, math.inf, 1]),
        )
        last, one = frozenset({self.addresses[-1]}), frozenset({pick(self.addresses)})
        liked = [Constraint(workers=some, preferred_only=True) for some in (last, one)]
        bound = [Constraint(workers=last)]
        #: Where requests may run. The last worker is there in the end.
        self._constraints = pick(
            [[ANYWHERE], [ANYWHERE, *bound, *liked], [ANYWHERE, *bound, *liked], bound]
        )
        self._keys = itertools.count()
        for name in NAMES:
            self.cluster.deploy(name)
        for address in self.addresses:
            self.cluster.join(address)

    # What clients do

    def submit(self) -> None:
        name = self.random.choice(NAMES)
        for _ in range(self.random.randint(1, 4)):
            self._submit(next(self._keys), name)

    def cancel(self) -> None:
        if (task := self._any_task(ended=False)) is not None:
            self.cluster.tasks.forget(task)

    def submit_again(self) -> None:
        """Another request gets the key of one that has ended, or is cancelled."""
        if (task := self._any_task(ended=self.random.random() < 0.5)) is not None:
            name = self.cluster.requests[task.key].name
            self.cluster.tasks.forget(task)
            self._submit(task.key, name)

    def retry(self) -> None:
        """A client retries what has failed, or Dask what it has lost."""
        if (task := self._any_task(ended=True)) is not None:
            self.cluster.tasks.park(task)

    def redeploy(self) -> None:
        """Undeploy; deploy again at once, or the next time."""
        name = self.random.choice(NAMES)
        if name in self.cluster.registry.deployments:
            self.cluster.undeploy(name)
            if self.random.random() < 0.5:
                return
        self.cluster.deploy(name)

    def restart(self) -> None:
        self.cluster.restart()

    # What workers do

    def answer(self) -> None:
        if (address := self._any_busy()) is not None:
            self.cluster.answer(address)

    def refuse(self) -> None:
        """The model raises for some of a batch, or for all."""
        if (address := self._any_busy()) is not None:
            some, others = self._split_first(address)
            failed = dict.fromkeys(some, FAILURE)
            self.cluster.answer(address, keys=others, failed=failed)

    def miss_inputs(self) -> None:
        if (address := self._any_busy()) is not None:
            some, others = self._split_first(address)
            self.cluster.answer(address, keys=others, missing=some)

    def fetch(self) -> None:
        """A batch has to wait for inputs."""
        if (address := self._any_busy()) is not None:
            batches = self.cluster.batches[address]
            begun = "fetched" in batches[0]
            if len(batches) > begun:
                self.cluster.fetch(address, self.random.randrange(begun, len(batches)))

    def fetched(self) -> None:
        fetching = self.cluster.fetching
        if found := [address for address in fetching if fetching[address]]:
            self.cluster.fetched(self.random.choice(found))

    def hold_or_begin(self) -> None:
        """A user's task takes the device, or gives it back."""
        if (address := self._any_busy()) is not None:
            pick = self.random.choice
            pick([self.cluster.hold, self.cluster.begin])(address)

    def break_device(self) -> None:
        if (address := self._any_busy()) is not None:
            struck, _ = self._split_first(address)
            about: Any = {"struck": struck, "broken": "507015", "passes": []}
            self.cluster.answer(address, keys=[], **about)
            if address in self.cluster.batches:
                self.cluster.take_out(address)

    def say_late(self) -> None:
        """A worker answers what was taken away from it."""
        if self.cluster.strays:
            self.cluster.say(*self.cluster.strays.pop())

    def load_or_unload(self) -> None:
        """A worker gets on with what it was told to load, or to free."""
        if (address := self._any_worker()) is not None:
            self.cluster.memory.work(address)

    def die(self) -> None:
        self.cluster.lose(self.random.choice(self.addresses), expected=False)

    def retire(self) -> None:
        self.cluster.lose(self.random.choice(self.addresses), expected=True)

    def rejoin(self) -> None:
        self._join_if_out(self.random.choice(self.addresses))

    def pause_or_resume(self) -> None:
        self.cluster.tasks.paused ^= {self.random.choice(self.addresses)}
        self.cluster.dispatcher.workers_changed()

    # What all comes to in the end

    def calm_down(self, *, without: str | None) -> None:
        """Everything is there again, but for one worker."""
        self.cluster.tasks.paused.clear()
        self.cluster.dispatcher.workers_changed()
        for name in NAMES:
            if name not in self.cluster.registry.deployments:
                self.cluster.deploy(name)
        for address in self.addresses:
            if address != without:
                self._join_if_out(address)
                while self.cluster.fetching[address]:
                    self.cluster.fetched(address)

    # Choices

    def _submit(self, key: int, name: str) -> None:
        pick = self.random.choice
        request = Request(
            key,
            name,
            None,
            asyncio.get_running_loop().time(),
            priority=pick([0.0, 0.0, 5.0]),
            rows=pick([1, 1, 3]),
            signature=pick(["s", "s", "t"]),
            constraint=pick(self._constraints),
            timeout=pick([None] * 20 + [1e-9, 0.1, 5.0]),
        )
        self.cluster.submit(request, deadly=self.random.random() < 0.02)

    def _join_if_out(self, address: str) -> None:
        if address not in self.cluster.batches:
            doubt = self.random.choice([None, "its process is new"])
            self.cluster.join(address, doubt)

    def _any_task(self, *, ended: bool) -> Task | None:
        tasks = self.cluster.tasks.by_key.values()
        found = [task for task in tasks if (task.state in ENDED) is ended]
        return self.random.choice(found) if found else None

    def _any_worker(self) -> str | None:
        there = list(self.cluster.batches)
        return self.random.choice(there) if there else None

    def _any_busy(self) -> str | None:
        batches = self.cluster.batches
        busy = [address for address in batches if batches[address]]
        return self.random.choice(busy) if busy else None

    def _split_first(self, address: str) -> tuple[list[int], list[int]]:
        """Some requests of a worker's first batch, and the others."""
        keys = self.cluster.wanted(self.cluster.batches[address][0])
        count = self.random.randint(1, 4)
        return keys[:count], keys[count:]
