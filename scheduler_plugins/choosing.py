"""Which batch of a version leaves next, and for which device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from daskinfer.protocol import PLAIN
from scheduler_plugins.batching import Send
from scheduler_plugins.line import LaneKey
from scheduler_plugins.live import roomiest
from scheduler_plugins.reserving import Reservations

if TYPE_CHECKING:
    from scheduler_plugins.admission import Admission
    from scheduler_plugins.affinity import Affinity
    from scheduler_plugins.fitness import Fitness
    from scheduler_plugins.line import Line
    from scheduler_plugins.load import DeviceLoad, Link
    from scheduler_plugins.queueing import Lane
    from scheduler_plugins.starving import Starvation

#: Lanes of one version and constraint looked at per decision. Younger ones get
#: their turn when the older ones have left.
_LANES = 32


class Choice(NamedTuple):
    """Requests of a lane, and where they go."""

    lane: Lane
    send: Send


class Chooser:
    """Asks the policies of a version about what waits for it.

    Parameters
    ----------
    admission
        Knows which devices a lane may use.
    fitness
        Knows which of them are fit.
    starvation
        Is told who has no device to go to.
    link
        What messages take.
    affinity
        Knows where results are.
    """

    def __init__(
        self,
        admission: Admission,
        fitness: Fitness,
        starvation: Starvation,
        link: Link,
        affinity: Affinity,
    ) -> None:
        self._admission = admission
        self._fitness = fitness
        self._starvation = starvation
        self._link = link
        self._affinity = affinity
        self.reserved = Reservations()

    def __repr__(self) -> str:
        return f"<Chooser {self.reserved!r}>"

    def begin(self) -> None:
        """All versions are about to be asked."""
        self.reserved.begin()

    def release(self) -> bool:
        """Let go of devices that nobody asks for; tell whether there was any."""
        return self.reserved.release()

    def choose(
        self, line: Line, running: Collection[str], now: float
    ) -> Choice | float:
        """Find the next batch of a version.

        Parameters
        ----------
        line
            The version.
        running
            Addresses of the workers that take tasks.
        now
            The time.

        Returns
        -------
        Choice or float
            What to send; or when to ask again if nothing happens before.
        """
        lanes = line.queue.oldest(_LANES)
        trial = self._fitness.trial(line, lanes, running, now, self.reserved)
        if trial is not None:
            self._starvation.ended(line)
            return Choice(*trial)
        until = line.health.next(now)
        fit = self._fitness.fit(line, running, now)
        rested = self._fitness.rested(line, fit, now)
        starving = True
        for lane in lanes:
            devices = self._admission.devices(lane, rested, fit)
            if not devices:
                continue
            starving = False
            self._starvation.ended(line)
            if line.kind != PLAIN:
                devices = roomiest(line, devices)
                if not devices:
                    continue
            open_to_all = self.reserved.open_to(None, devices)
            decision = self._affinity.decide(
                line, lane, open_to_all, now
            ) or self._decide(line, lane, devices, now)
            if isinstance(decision, Send):
                return Choice(lane, _within_room(line, decision))
            if decision is not None:
                until = min(until, decision)
        if starving:
            until = min(until, self._starvation.begun(line, now))
        return until

    def _decide(
        self, line: Line, lane: Lane, devices: list[DeviceLoad], now: float
    ) -> Send | float | None:
        head = lane.head()
        assert head is not None
        isolated = cast(LaneKey, lane.key).group is not None
        devices = self.reserved.open_to(lane if isolated else None, devices)
        decision = line.batcher.decide(
            now,
            waiting=lane.rows,
            oldest=head.arrived,
            devices=devices,
            transfer=self._admission.transfer(head),
            alone=isolated,
        )
        if isinstance(decision, Send):
            return decision
        if isolated:
            self.reserved.keep(lane, devices, now, self._link)
        return decision.until


def _within_room(line: Line, send: Send) -> Send:
    """No more rows than a device may begin streams, where there is one for each."""
    if line.kind == PLAIN:
        return send
    name = send.device.name
    free = max(line.most_streams_on(name) - line.streams_on(name), 1)
    return replace(send, rows=min(send.rows, free))
