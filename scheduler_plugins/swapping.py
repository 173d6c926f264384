"""Has models loaded where they are asked for, and others make room for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from distributed.metrics import monotonic

from daskinfer import config
from daskinfer.exceptions import ModelTooLarge
from daskinfer.failure import dump_failure
from daskinfer.logs import Log
from daskinfer.weights import too_large
from scheduler_plugins.claims import Claims
from scheduler_plugins.deployment import Deployment, ReplicaState, Version
from scheduler_plugins.looking import Looks
from scheduler_plugins.room import Place, Space, find_place, never_fits, soonest
from scheduler_plugins.survey import Survey, load_seconds

if TYPE_CHECKING:
    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.line import LaneKey, Line
    from scheduler_plugins.queueing import Lane

logger = Log("swapping")

#: Lanes of a version that are looked at.
_LANES = 32
#: Times as long as expected that a load may take before another worker begins one, and
#: seconds that it may take in any case.
_PATIENCE, _LEAST_PATIENCE = 10, 10.0
#: Seconds between two looks for room, for one version, and how many may look in vain
#: in that time: where there are more, each looks less often. Looking takes a while,
#: and what has changed meanwhile is seen then.
_PAUSE, _LOOKS = 0.02, 8


class Swapping:
    """Decides when a cold version is loaded, and enacts it.

    A version is cold on a worker whose memory others have. Its requests wait in the
    queue: it is loaded where no worker could take them, or where those that could are
    busy for longer than a load takes. The least recently used make room, but nobody who
    has batches under way or requests that wait, unless that goes on for its turn.

    Parameters
    ----------
    plugin
        Whose registry, dispatcher and workers are concerned.

    Notes
    -----
    :mod:`~scheduler_plugins.room` chooses the worker.
    """

    def __init__(self, plugin: InferencePlugin) -> None:
        self.plugin = plugin
        self._turn = config.seconds("weights.turn") or 0.0
        self._awaited: dict[tuple[str, str], Version] = {}
        self._crowded: set[str] = set()
        self._first_looks, self._looks = (Looks(_PAUSE, _LOOKS) for _ in range(2))
        self._claims = Claims()
        self._survey: Survey | None = None

    def __repr__(self) -> str:
        return f"<Swapping awaits: {sorted(self._awaited)}>"

    # Events

    def assigned(self, *versions: Version) -> None:
        """Some workers have been told to load versions; on others they are cold.

        Or workers have left.
        """
        self._survey = None
        for version in versions:
            deployment = self.plugin.registry.deployments[version.name]
            self._refuse(deployment, version)
            if version.cold and _is_awaited(deployment, version):
                self._awaited[version.name, version.version] = version
        self.plugin.dispatcher.wake()

    def loaded(self, address: str) -> None:
        """A worker has loaded something: if it takes too much, others must leave."""
        self._survey = None
        self._relieve(address, monotonic())

    def freed(self) -> None:
        """A version is gone: others may have its room."""
        versions = list(self.plugin.registry.versions())
        again = [v for v in versions if self.plugin.registry.memory.reconsider(v)]
        # This wakes the dispatcher, too.
        self.assigned(*again)

    def check(self, busy: Collection[Line], now: float) -> float:
        """See to those who wait for a cold version; return when to ask again.

        Parameters
        ----------
        busy
            The versions that have requests waiting.
        now
            Monotonic time in seconds.
        """
        self._survey = None
        until = math.inf
        for address in list(self._crowded):
            until = min(until, _or_never(self._relieve, address, now))
        cold = {(line.name, line.version): line for line in busy if line.cold}
        return min(
            until,
            self._first_looks.take(
                self._awaited, partial(_or_never, self._first_load), now
            ),
            self._looks.take(cold, partial(_or_never, self._asked_for), now),
        )

    def _relieve(self, address: str, now: float) -> float:
        """Have others leave a worker whose models take too much; or ask again."""
        self._crowded.discard(address)
        worker = self.plugin.registry.workers.get(address)
        until = math.inf
        for kind in () if worker is None else worker.room:
            space = self._look().space(address, kind)
            if space.free < 0:
                place = find_place([space], 0, now, self._turn, urgent=True)
                if isinstance(place, Place):
                    self._make_room(place)
                else:
                    self._crowded.add(address)
                    until = min(until, place)
        return until

    # Without requests

    def _first_load(self, version: Version, now: float) -> float:
        """See to a version that no worker has tried, or that all shall have."""
        which = version.name, version.version
        deployment = self.plugin.registry.deployments.get(version.name)
        if deployment is None or deployment.versions.get(which[1]) is not version:
            del self._awaited[which]
            return math.inf
        has_come = bool(version.ready()) and not deployment.kept_loaded
        if not version.cold or has_come or not _is_awaited(deployment, version):
            del self._awaited[which]
            return math.inf
        if not deployment.kept_loaded:
            return self._load_one(deployment, version, version.cold, now)
        return min(
            self._load_one(deployment, version, [address], now)
            for address in list(version.cold)
        )

    def _refuse(self, deployment: Deployment, version: Version) -> None:
        """Have a version fail where it never fits, whoever leaves."""
        workers = self.plugin.registry.workers
        cold = {a: workers[a] for a in sorted(version.cold)}
        spaces = [self._look().space(a, deployment.kind(w)) for a, w in cold.items()]
        hopeless = [space for space in spaces if never_fits(space, version.nbytes)]
        update = deployment.update
        is_update = update is not None and update.version == version.version
        if not hopeless and is_update and version.is_nowhere:
            # Nor does an update wait that fits nowhere beside what it is to follow.
            spaces = self._look().spaces(deployment, version, cold)
            if all(never_fits(space, version.nbytes) for space in spaces):
                hopeless = spaces
        for space in hopeless:
            kind = deployment.kind(workers[space.address])
            error = ModelTooLarge(_too_large(version, space, kind))
            self.plugin.registry.memory.refuse(
                version, space.address, str(error), dump_failure(error)
            )
        if hopeless:
            self._survey = None
            self.plugin.versions.settle(deployment)
            self.plugin.service.changed()

    # For requests

    def _asked_for(self, line: Line, now: float) -> float:
        """See to a version that has requests waiting."""
        deployment = self.plugin.registry.deployments[line.name]
        version = deployment.versions[line.version]
        until = math.inf
        seen = set()
        for lane in line.queue.oldest(_LANES):
            key = cast("LaneKey", lane.key)
            if (key.constraint, key.tried) not in seen:
                seen.add((key.constraint, key.tried))
                found = self._load_for(lane, line, deployment, version, now)
                until = min(until, found)
        return until

    def _load_for(
        self,
        lane: Lane,
        line: Line,
        deployment: Deployment,
        version: Version,
        now: float,
    ) -> float:
        dispatcher = self.plugin.dispatcher
        running = set(self.plugin.tasks.running())
        fit = dispatcher.fitness.fit(line, running, now)
        serving = dispatcher.admission.devices(lane, fit, [])
        # Once it is loaded it is tried.
        on_trial = set(line.health.candidates(now))
        stuck = {device.name for device in dispatcher.fitness.stuck}
        cold = [
            address
            for address in version.cold & running
            if line.health.admits(address) or address in on_trial
            if address not in stuck
        ]
        allowed = dispatcher.admission.workers(lane, cold)
        if not allowed or any(device.takes_more() for device in serving):
            return math.inf
        if serving:
            busy = min(d.expected_free(now, dispatcher.link) for d in serving) - now
            busy += line.waiting_seconds() / len(serving)
            if busy < load_seconds(version):
                return math.inf
        loading = dispatcher.admission.workers(lane, _loading(version))
        return self._load_one(
            deployment, version, allowed, now, loading, urgent=not serving
        )

    # Loading

    def _load_one(
        self,
        deployment: Deployment,
        version: Version,
        addresses: Iterable[str],
        now: float,
        loading: Iterable[str] | None = None,
        *,
        urgent: bool = True,
    ) -> float:
        """Load a version on one of some workers, unless one is loading it already.

        One of ``loading`` that is, or any.
        """
        until = _under_way_until(
            version, _loading(version) if loading is None else loading
        )
        if now < until:
            return until
        line = self.plugin.dispatcher.lines[version.name, version.version]
        known = self._look().spaces(deployment, version, addresses)
        spaces = []
        for space in known:
            kind = deployment.kind(self.plugin.registry.workers[space.address])
            never = never_fits(space, version.nbytes)
            told = _too_large(version, space, kind) if never else None
            version.replicas[space.address].reason = told
            if self._claims.admits(line, (space.address, kind), now):
                spaces.append(space)
        place = find_place(spaces, version.nbytes, now, self._turn, urgent=urgent)
        if not isinstance(place, Place):
            claimed = soonest(spaces, version.nbytes, self._turn) if urgent else None
            if claimed is not None:
                kind = deployment.kind(self.plugin.registry.workers[claimed])
                pause = max(self._first_looks.pause, self._looks.pause)
                self._claims.claim(line, (claimed, kind), now + pause)
            # Who has a claim to the others may give it up.
            return place if spaces == known else min(place, now + self._turn)
        self._claims.drop(line)
        self._make_room(place)
        address = place.address
        replica = self.plugin.registry.memory.reload(version, address)
        self._look().changed(address)
        self.plugin.loading.load(version, replica)
        self.plugin.service.changed()
        return math.inf

    def _make_room(self, place: Place) -> None:
        for tenant in place.leaving:
            name, version = tenant.which
            logger.info(
                "%s lets go of %r %r for others",
                *(place.address, name, version),
                deployment=name,
                version=version,
                stimulus_id=f"daskinfer-unload-{name}-{version}",
            )
            found = self.plugin.registry.deployments[name].versions[version]
            self.plugin.registry.memory.evict(found, place.address)
            self.plugin.dispatcher.lines[name, version].devices.pop(place.address, None)
            self.plugin.unloading.ask(
                place.address, name, version, tenant.nbytes, keep=True
            )
        self._look().changed(place.address)

    # What workers have

    def _look(self) -> Survey:
        """What there is to know, found out once for as long as nothing changes."""
        if self._survey is None:
            dispatcher = self.plugin.dispatcher
            busy = [*dispatcher.running.batches.values(), *dispatcher.streams.live]
            self._survey = Survey(self.plugin.registry, dispatcher.lines, busy)
        return self._survey


def _or_never(look: Callable[[Any, float], float], what: Any, now: float) -> float:
    """See to something, and go on with others if that fails."""
    try:
        return look(what, now)
    except Exception:
        logger.exception(
            "nothing can be found for %r",
            what,
            deployment=getattr(what, "name", None),
            version=getattr(what, "version", None),
            stimulus_id="daskinfer-look",
        )
        return math.inf


def _is_awaited(deployment: Deployment, version: Version) -> bool:
    """Whether a version is to be loaded though there are no requests for it."""
    update = deployment.update
    is_update = update is not None and update.version == version.version
    return (
        (deployment.kept_loaded and version.version in deployment.serving())
        or not version.loads
        or (is_update and not version.answered)
    )


def _loading(version: Version) -> list[str]:
    """Workers that are loading a version."""
    loading = (ReplicaState.LOADING, ReplicaState.WARMING)
    return [a for a, r in version.replicas.items() if r.state in loading]


def _under_way_until(version: Version, loading: Iterable[str]) -> float:
    """Until when a load that is under way is waited for. A worker may be frozen."""
    asked = [version.replicas[address].asked for address in loading]
    patience = max(_PATIENCE * load_seconds(version), _LEAST_PATIENCE)
    return max(asked, default=-math.inf) + patience


def _too_large(version: Version, space: Space, kind: str) -> str:
    kept = sum(tenant.nbytes for tenant in space.tenants if tenant.is_fixed)
    about = version.name, version.version, version.nbytes
    return too_large(*about, space.nbytes, kind, space.address, kept=kept)
