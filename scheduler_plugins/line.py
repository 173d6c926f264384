"""A deployment version in service: who waits for it, and what was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dask.typing import Key

from daskinfer.cache.gate import HitGate
from daskinfer.protocol import PLAIN, STEPS
from daskinfer.timing.latency import LatencyModel
from scheduler_plugins.batching import Batcher
from scheduler_plugins.constraint import Constraint
from scheduler_plugins.health import Health
from scheduler_plugins.hit_cost import HitCost
from scheduler_plugins.load import DeviceLoad, Link
from scheduler_plugins.pace import Pace
from scheduler_plugins.placement import resolve
from scheduler_plugins.queueing import RequestQueue
from scheduler_plugins.request import Request
from scheduler_plugins.statistics import Figures, Statistics
from scheduler_plugins.trail import Attempt

if TYPE_CHECKING:
    from scheduler_plugins.deployment import Deployment, Version


class LaneKey(NamedTuple):
    """What requests have in common that may share a forward pass.

    ``home`` is the worker that holds inputs too large to move lightly, ``holder`` one
    that has the results in its cache, ``tried`` are those to be avoided. What is
    in a ``group`` runs isolated: nothing runs before or behind it on its device, as a
    worker has died under it.
    """

    signature: Hashable
    constraint: Constraint
    home: str | None = None
    group: Hashable | None = None
    tried: frozenset[str] = frozenset()
    holder: str | None = None


@dataclass(slots=True)
class Batch:
    """Requests that were sent together and are not answered yet.

    Those of a ``retry`` have failed elsewhere before. One that is
    ``looked_up`` was sent to be found in a cache: the device is not expected to run it.
    One that is ``overdue`` is past its time limit. One that ``died`` was running when
    its worker was lost. Those that were ``given_up`` run elsewhere by now. The worker
    was not told: its late results are taken if they come first. It is ``predicted`` to
    take so many seconds on the device, and ``begins`` so many streams, as far as is
    known. The ``attempt`` is what its requests keep of it.
    """

    batch_id: str
    line: Line
    device: DeviceLoad
    run_ids: dict[Key, int]
    requests: dict[Key, Request]
    rows: int
    sent_at: float
    retry: bool = False
    looked_up: bool = False
    overdue: bool = False
    died: bool = False
    given_up: dict[Key, Request] = field(default_factory=dict)
    predicted: float | None = None
    begins: int = 0
    attempt: Attempt = field(init=False)

    def __post_init__(self) -> None:
        about = self.batch_id, self.line.version, self.device.name, self.rows
        self.attempt = Attempt(*about, len(self.requests), self.sent_at)

    @property
    def stimulus_id(self) -> str:
        """What Dask's logs call the sending of this batch."""
        return f"daskinfer-run-{self.batch_id}"

    @property
    def waits_since(self) -> float | None:
        """Since when it waits for more than its turn; None if it does not."""
        flight = self.device.flight(self.batch_id)
        return None if flight is None else flight.waits_since

    @property
    def waits_for(self) -> str:
        """For what it waits but its turn; see :data:`daskinfer.protocol.INPUTS`."""
        flight = self.device.flight(self.batch_id)
        return "" if flight is None else flight.waits_for

    @property
    def is_running(self) -> bool:
        """Whether it is what its device runs now, as far as can be known."""
        running = self.device.running
        return running is not None and running.batch_id == self.batch_id


class Line:
    """One deployment version: who waits for it, and how its batches are made.

    ``in_flight`` counts its batches under way, ``delayed`` the requests that are held
    back until their next attempt. ``served`` is the device time in seconds it was
    given, the measure by which deployments take turns. ``counts`` are the
    deployment's, of all its versions; ``figures`` are its own. With ``affinity``,
    requests go where their results are cached, if that is faster by what look-ups take
    (``hit_cost``) and that happens now and then (``hit_gate``). Workers where it is
    ``cold`` load it first; ``used`` says when the others last did something for it.
    It answers as its ``kind`` says. ``streaming`` counts by worker the streams that are
    under way, and ``begins`` the requests there that may become some. How fast those
    advance that step together, ``pace`` knows.
    """

    def __init__(
        self,
        deployment: Deployment,
        version: Version,
        link: Link,
        age: float,
        counts: Statistics,
    ) -> None:
        policy = version.policy
        self.name = deployment.name
        self.version = version.version
        self.digest = version.digest
        self.policy = policy
        self.counts = counts
        self.figures = Figures()
        self.retry = deployment.retry
        self.batch_timeout = deployment.batch_timeout
        self.max_queue = deployment.max_queue
        self.health = Health(deployment.breaker)
        self.affinity = deployment.cache is not None and deployment.cache.affinity
        self.hit_cost = HitCost()
        self.hit_gate = HitGate()
        self.queue = RequestQueue(age)
        self.latency = LatencyModel(policy.max_batch_size, policy.allowed_batch_sizes)
        self.batcher = Batcher(
            policy, self.latency, resolve(deployment.placement), link
        )
        self.devices: dict[str, DeviceLoad] = {}
        self.cold = version.cold
        self.used: dict[str, float] = {}
        self.device_class = ""  # of the latest device
        self.served = 0.0
        self.in_flight = 0
        self.kind = PLAIN
        self.max_streams = deployment.streaming.max_streams
        self.idle_timeout = deployment.streaming.idle_timeout
        self.streaming: Counter[str] = Counter()
        self.begins: Counter[str] = Counter()
        self.pace = Pace()
        self.delayed = 0

    def streams_on(self, address: str) -> int:
        """How many streams a worker has, those that are about to begin included."""
        return self.streaming[address] + self.begins[address]

    def most_streams_on(self, address: str) -> int:
        """How many streams a worker may have."""
        if self.kind != STEPS:
            return self.max_streams
        return min(self.max_streams, self.pace.room(address))

    def waiting_seconds(self) -> float:
        """Device time that those who wait need, on devices like the latest."""
        if self.kind == STEPS:
            return self.pace.waiting_seconds(len(self.queue), [*self.devices])
        best = self.batcher.best_size(self.device_class)
        seconds = self.latency.curve(self.device_class).at(best)
        return self.queue.rows * seconds / best

    def waited(self, now: float) -> float:
        """For how many seconds those have waited whose turn is next."""
        heads = [lane.head() for lane in self.queue.oldest(1)]
        return max(
            (now - head.arrived for head in heads if head is not None), default=0.0
        )

    def __repr__(self) -> str:
        return (
            f"<Line {self.name!r} {self.version!r} waiting: {len(self.queue)} "
            f"in flight: {self.in_flight} devices: {len(self.devices)}>"
        )
