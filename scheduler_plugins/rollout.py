"""How one version of a deployment takes over from another.

A version is registered, loaded and warmed by each worker, ready there, active, and then
the previous one, to which one can go back at once. When the next takes over it leaves:
its batches under way are answered, it is retired, and unloaded everywhere. One that
fails, or is given up, leaves as well.

Pure: events in, actions out, which :mod:`~scheduler_plugins.versions` enacts.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

from daskinfer.exceptions import (
    NoPreviousVersion,
    NoUpdate,
    UpdateInProgress,
    VersionExists,
    VersionNotReady,
)
from daskinfer.wording import counted
from scheduler_plugins.deployment import Deployment, ReplicaState, Version, WorkerFacts
from scheduler_plugins.routing import Route


class Phase(str, Enum):
    """How far an update is."""

    LOADING = "loading"
    READY = "ready"  # waits for `promote`
    CANARY = "canary"
    ACTIVE = "active"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def has_ended(self) -> bool:
        """Whether the update is over."""
        return self in (Phase.ACTIVE, Phase.FAILED, Phase.ABORTED)


@dataclass(slots=True, eq=False)
class Update:
    """A version that is to take over.

    Attributes
    ----------
    version
        Its label.
    min_ready
        Which part of the eligible workers must be ready for it; at least one.
    waits
        Whether it becomes active only by ``promote``.
    share
        The share of the requests that it answers until then.
    keeps
        Whether the version before it stays resident.
    phase
        How far it is.
    reason, failure
        Why it has not become active, in words and as a worker's exception.
    """

    version: str
    min_ready: float = 1.0
    waits: bool = False
    share: float = 0.0
    keeps: bool = True
    phase: Phase = Phase.LOADING
    reason: str = ""
    failure: Any = None

    def __repr__(self) -> str:
        return f"<Update to {self.version!r}: {self.phase.value}>"


@dataclass(frozen=True, slots=True)
class Reroute:
    """Other versions answer now: let who waits wait for those."""

    name: str


@dataclass(frozen=True, slots=True)
class Drain:
    """A version is given no requests any more; say when its last batch has ended."""

    version: Version


@dataclass(frozen=True, slots=True)
class Unload:
    """A version is wanted by nobody: free what it takes, on every worker."""

    version: Version


Action: TypeAlias = Reroute | Drain | Unload


def begin(deployment: Deployment, update: Update, version: Version) -> None:
    """Register a version that is to take over.

    Raises
    ------
    UpdateInProgress
        If another one is about to.
    VersionExists
        If there is one of its label, or was one that has answered requests.
    ValueError
        If it joins requests along another axis.
    """
    name, label = deployment.name, update.version
    under_way = deployment.update
    if under_way is not None:
        raise UpdateInProgress(
            f"{name!r} is being updated to version {under_way.version!r} already "
            f"({under_way.phase.value}): wait for it, or give it up with model.abort()"
        )
    if label in deployment.versions or label in deployment.retired:
        was = "has" if label in deployment.versions else "had"
        raise VersionExists(
            f"{name!r} {was} a version {label!r}: give this one a label of its own"
        )
    if version.policy.batch_dim != deployment.batch_dim:
        raise ValueError(
            f"batch_dim must stay {deployment.batch_dim}, as handles of {name!r} have "
            f"it, not become {version.policy.batch_dim}: deploy under another name"
        )
    deployment.update, deployment.outcome = update, None
    deployment.versions[label] = version


def settle(deployment: Deployment, workers: Collection[WorkerFacts]) -> list[Action]:
    """Something has changed on a worker: see whether the update can go on."""
    update = deployment.update
    if update is None or update.phase is not Phase.LOADING:
        return []
    version = deployment.versions[update.version]
    eligible = _eligible(deployment, version, workers)
    missing = _missing(version, update, eligible)
    if eligible and missing <= 0:
        return _loaded(deployment, update)
    failed = [
        version.replicas[address]
        for address in eligible
        if address in version.replicas
        and version.replicas[address].state is ReplicaState.FAILED
    ]
    pending = len(eligible) - len(failed) - len(version.ready())
    if not eligible or missing <= pending:
        return []
    told = "; ".join(f"{r.address}: {r.reason}" for r in failed)
    update.failure = next((r.failure for r in failed if r.failure is not None), None)
    return _end(
        deployment,
        Phase.FAILED,
        f"version {update.version!r} of {deployment.name!r} could not be loaded on "
        f"{counted(len(failed), 'worker')} of {len(eligible)}, and version "
        f"{deployment.active!r} stays active: {told}",
    )


def promote(
    deployment: Deployment, label: str | None, workers: Collection[WorkerFacts]
) -> list[Action]:
    """Make the version of the update the active one.

    Raises
    ------
    NoUpdate
        If there is none, or of another label.
    VersionNotReady
        If too few workers are ready for it.
    """
    update = _update_of(deployment, label, "promote")
    version = deployment.versions[update.version]
    eligible = _eligible(deployment, version, workers)
    missing = _missing(version, update, eligible)
    # It was ready, and will be when it is asked for.
    is_cold = not eligible and bool(version.cold) and bool(version.loads)
    if missing > 0 and not is_cold:
        states = ", ".join(
            f"{r.address} is {r.state.value}"
            for r in version.replicas.values()
            if r.state is not ReplicaState.READY
        )
        raise VersionNotReady(
            f"version {update.version!r} of {deployment.name!r} needs "
            f"{counted(missing, 'more worker')} to be ready ({states or 'none is'}): "
            "promote it later, or update with a smaller min_ready="
        )
    return _activate(deployment, update)


def share(deployment: Deployment, label: str, part: float) -> list[Action]:
    """Let the version of the update answer a share of the requests.

    Raises
    ------
    NoUpdate
        If there is none, or of another label.
    VersionNotReady
        If it is being loaded.
    """
    update = _update_of(deployment, label, "send traffic to")
    if update.phase is Phase.LOADING:
        raise VersionNotReady(
            f"version {label!r} of {deployment.name!r} is being loaded: give "
            "traffic= to update, or wait for it"
        )
    update.share, update.waits = part, True
    return _offer(deployment, update)


def rollback(deployment: Deployment) -> list[Action]:
    """Make the previous version the active one, and the other way round.

    Raises
    ------
    NoPreviousVersion
        If there is none, or no worker is ready for it.
    """
    label = deployment.previous
    if label is None:
        raise NoPreviousVersion(
            f"{deployment.name!r} has no version before {deployment.active!r} that is "
            "still loaded: update it to what you want"
        )
    found = deployment.versions[label]
    if not (found.ready() or found.cold):
        raise NoPreviousVersion(
            f"no worker is ready for version {label!r} of {deployment.name!r}: wait "
            "until one has loaded it"
        )
    deployment.previous = deployment.active
    deployment.route = replace(deployment.route, active=label)
    return [Reroute(deployment.name)]


def abort(
    deployment: Deployment, reason: str, label: str | None = None
) -> list[Action]:
    """Give the update up.

    Raises
    ------
    NoUpdate
        If there is none, or of another label.
    """
    _update_of(deployment, label, "abort")
    return _end(deployment, Phase.ABORTED, reason)


def drained(deployment: Deployment, label: str) -> list[Action]:
    """The last batch of a version that leaves has ended."""
    if label not in deployment.leaving:
        return []
    deployment.leaving.discard(label)
    version = deployment.versions.pop(label)
    if version.answered:
        deployment.retired.append(label)
    return [Unload(version)]


def _eligible(
    deployment: Deployment, version: Version, workers: Collection[WorkerFacts]
) -> list[str]:
    """Workers that shall have a version before it answers.

    Where there is no room, it is loaded when it is asked for.
    """
    return [
        worker.address
        for worker in workers
        if deployment.refusal(worker) is None and worker.address not in version.cold
    ]


def _missing(version: Version, update: Update, eligible: list[str]) -> int:
    """How many more workers must be ready."""
    wanted = math.ceil(update.min_ready * len(eligible) - 1e-9)
    return max(wanted, 1) - len(version.ready())


def _update_of(deployment: Deployment, label: str | None, what: str) -> Update:
    update = deployment.update
    if update is not None and label in (None, update.version):
        return update
    there = "no update is under way"
    if update is not None:
        there = f"the one under way is to version {update.version!r}"
    about = "nothing" if label is None else f"no version {label!r}"
    raise NoUpdate(
        f"{deployment.name!r} has {about} to {what}: {there}, and version "
        f"{deployment.active!r} is active"
    )


def _loaded(deployment: Deployment, update: Update) -> list[Action]:
    if update.share or update.waits:
        return _offer(deployment, update)
    return _activate(deployment, update)


def _offer(deployment: Deployment, update: Update) -> list[Action]:
    """Let the update's version answer its share, and wait for what is decided."""
    update.phase = Phase.CANARY if update.share else Phase.READY
    if update.share:
        deployment.versions[update.version].answered = True
        route = Route(deployment.active, update.version, update.share)
    else:
        route = Route(deployment.active)
    deployment.route = route
    return [Reroute(deployment.name)]


def _activate(deployment: Deployment, update: Update) -> list[Action]:
    old, older = deployment.active, deployment.previous
    deployment.versions[update.version].answered = True
    deployment.route = Route(update.version)
    deployment.previous = old if update.keeps else None
    deployment.update = None
    deployment.outcome = f"version {update.version!r} has become active"
    update.phase = Phase.ACTIVE
    gone = [label for label in (older, old) if label not in (None, deployment.previous)]
    return [Reroute(deployment.name), *_retire(deployment, *filter(None, gone))]


def _end(deployment: Deployment, phase: Phase, reason: str) -> list[Action]:
    update = deployment.update
    assert update is not None
    update.phase, update.reason = phase, reason
    deployment.update, deployment.outcome = None, reason
    deployment.route = Route(deployment.active)
    return [Reroute(deployment.name), *_retire(deployment, update.version)]


def _retire(deployment: Deployment, *labels: str) -> list[Action]:
    deployment.leaving.update(labels)
    return [Drain(deployment.versions[label]) for label in labels]
