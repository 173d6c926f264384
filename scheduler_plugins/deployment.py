"""What was asked for under one name, and how far each worker is with it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from daskinfer.artifact.digests import version_digest
from daskinfer.breaker import BreakerPolicy
from daskinfer.caching import CachePolicy
from daskinfer.policy import BatchPolicy
from daskinfer.retry import RetryPolicy
from daskinfer.streaming import StreamPolicy
from scheduler_plugins.routing import Route

if TYPE_CHECKING:
    from scheduler_plugins.rollout import Update

#: How often a version may break the device of a worker while it is loaded there.
MAX_BREAKS = 3
#: How many labels of the past a deployment remembers.
_REMEMBERED = 100


class ReplicaState(str, Enum):
    """How far a worker is with a version."""

    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    COLD = "cold"  # is loaded when it is asked for, as others have its place
    FAILED = "failed"


@dataclass(slots=True)
class WorkerFacts:
    """What a worker has told about itself.

    ``devices`` maps the kinds it can use to device classes, the best first;
    ``reasons`` says why it cannot use the others, ``broken`` why it can use none any
    more. ``seat`` is what it has in common with the process that comes in its place.
    ``room`` are the bytes that models may take, by kind of device; where it says
    nothing, there is no limit.
    """

    address: str
    devices: Mapping[str, str]
    reasons: Mapping[str, str]
    resources: Mapping[str, float]
    seat: str = ""
    room: Mapping[str, int] = field(default_factory=dict)
    broken: str | None = None


@dataclass(slots=True)
class Replica:
    """One version on one worker.

    ``load`` numbers the loads that were ever asked for, ``reloads`` counts those that
    brought something else, or failed though it had been ready before. ``doubt`` says
    why it is to be tried with one request before it is given more. ``since`` is when it
    was ready, and ``asked`` when it was told to load, in seconds on a monotonic clock.
    What ``is_parked`` is cold, and lies in the memory of the host. What ``is_refused``
    did not fit beside what must not go.
    """

    address: str
    load: int = 0
    state: ReplicaState = ReplicaState.LOADING
    device: str | None = None
    device_class: str | None = None
    digest: str | None = None
    reason: str | None = None
    failure: Any = None
    seconds: float = 0.0
    doubt: str | None = None
    reloads: int = 0
    since: float | None = None
    asked: float = 0.0
    is_parked: bool = False
    is_refused: bool = False


@dataclass(slots=True)
class Breakage:
    """How often a version broke the device of a worker, and how the last time."""

    times: int = 0
    reason: str = ""
    failure: Any = None


@dataclass(slots=True)
class Version:
    """One version of a deployment and its replicas by worker address.

    ``artifact`` and ``warmup`` are opaque here: what a worker needs to load it, but for
    large weights. The digest is that of the artifact and the policy.
    ``breakages`` are the devices that loading it broke, by the worker's seat. It has
    ``answered`` once it was active, or was given a share of the requests. Its weights
    take ``nbytes``. Workers where it is ``cold`` load it when it is asked for there.
    ``loads`` counts loads by where the weights came from, ``load_seconds`` is what the
    last of them took, and ``evictions`` counts how often it had to make room.
    """

    name: str
    version: str
    digest: str
    artifact: Any = None
    warmup: Any = None
    policy: BatchPolicy = field(default_factory=BatchPolicy)
    answered: bool = False
    replicas: dict[str, Replica] = field(default_factory=dict)
    breakages: dict[str, Breakage] = field(default_factory=dict)
    nbytes: int = 0
    cold: set[str] = field(default_factory=set)
    loads: Counter[str] = field(default_factory=Counter)
    load_seconds: dict[str, float] = field(default_factory=dict)
    evictions: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        version: str,
        artifact: Mapping[str, Any],
        warmup: Any,
        policy: BatchPolicy,
    ) -> Version:
        """Make one of an artifact's message."""
        digest = version_digest(artifact["digest"], asdict(policy))
        chunks = artifact["chunks"]
        return cls(
            name,
            version,
            digest,
            artifact,
            warmup,
            policy,
            # What a factory makes is known when it has been made.
            nbytes=0 if chunks is None else chunks["size"],
        )

    def __repr__(self) -> str:
        return f"<Version {self.name!r} {self.version!r} ready: {len(self.ready())}>"

    def ready(self) -> list[Replica]:
        """Replicas that may be sent requests."""
        return [r for r in self.replicas.values() if r.state is ReplicaState.READY]

    @property
    def is_nowhere(self) -> bool:
        """Whether it is cold on all workers that could have it."""
        return bool(self.cold) and len(self.cold) == len(self.replicas)

    def settled(self) -> bool:
        """Whether some worker has tried it, and none still does, or has to.

        What is cold but was loaded somewhere before will be again.
        """
        states = {replica.state for replica in self.replicas.values()}
        if states & {ReplicaState.LOADING, ReplicaState.WARMING}:
            return False
        if ReplicaState.READY in states:
            return True
        return bool(self.loads) if self.cold else bool(states)


@dataclass(slots=True)
class Deployment:
    """What was asked for under one name.

    ``route`` says which versions answer, ``previous`` which one can be gone back to at
    once. The one of the ``update`` is to take over; those ``leaving`` have batches
    under way still, and are unloaded after these. ``retired`` are the latest labels of
    what was unloaded after it had answered; ``outcome`` is that of the last update.
    What is ``kept_loaded`` never makes room for others.
    """

    name: str
    device: str
    resources: tuple[tuple[str, float], ...]
    placement: str
    route: Route
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    request_timeout: float | None = None
    max_queue: int | None = None
    batch_timeout: float | None = None
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    cache: CachePolicy | None = None
    kept_loaded: bool = False
    streaming: StreamPolicy = field(default_factory=StreamPolicy)
    versions: dict[str, Version] = field(default_factory=dict)
    previous: str | None = None
    update: Update | None = None
    leaving: set[str] = field(default_factory=set)
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    outcome: str | None = None

    @property
    def active(self) -> str:
        """The version that answers, canaries aside."""
        return self.route.active

    @property
    def policy(self) -> BatchPolicy:
        """How the requests of the active version are batched."""
        return self.versions[self.active].policy

    @property
    def batch_dim(self) -> int | None:
        """The axis along which requests are joined: that of all versions."""
        return self.policy.batch_dim

    def resident(self) -> list[Version]:
        """Versions that every worker shall have, the most needed ones first."""
        updated = None if self.update is None else self.update.version
        labels = [self.active, updated, self.previous]
        return [self.versions[label] for label in labels if label is not None]

    def __repr__(self) -> str:
        return f"<Deployment {self.name!r} versions: {sorted(self.versions)}>"

    def refusal(self, worker: WorkerFacts) -> str | None:
        """Why a worker cannot serve this deployment, or None if it can."""
        if worker.broken is not None:
            return worker.broken
        for resource, amount in self.resources:
            if worker.resources.get(resource, 0) < amount:
                has = ", ".join(
                    f"{name}={value:g}" for name, value in worker.resources.items()
                )
                return f"it lacks {resource}={amount:g} (it has {has or 'none'})"
        if not self.finds_device(worker):
            why = worker.reasons.get(self.device, "it is not there")
            return f"no {self.device} device: {why}"
        return None

    def finds_device(self, worker: WorkerFacts) -> bool:
        """Whether a worker has the kind of device that was asked for."""
        return self.device == "auto" or self.device in worker.devices

    def serving(self) -> set[str]:
        """Labels of the versions that answer, or are to."""
        updated = None if self.update is None else self.update.version
        labels = (self.active, self.route.canary, updated)
        return {label for label in labels if label is not None}

    def kind(self, worker: WorkerFacts) -> str:
        """The kind of device that a worker uses for it."""
        return next(iter(worker.devices), "") if self.device == "auto" else self.device
