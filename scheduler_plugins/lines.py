"""The versions in service, each with its queue."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from scheduler_plugins.line import Line
from scheduler_plugins.load import DeviceLoad
from scheduler_plugins.outcomes import Outcomes
from scheduler_plugins.statistics import Statistics

if TYPE_CHECKING:
    from scheduler_plugins.deployment import Deployment, Version
    from scheduler_plugins.load import Link
    from scheduler_plugins.request import Request


class Lines(dict[tuple[str, str], Line]):
    """Lines by deployment and version, their devices, and each deployment's counters.

    Parameters
    ----------
    link
        What messages take.
    priority_age
        Seconds of waiting that one unit of priority is worth.

    Attributes
    ----------
    statistics
        Counters of the deployments, by name.
    elsewhere
        How requests ended that were sent to none, or to one that is gone by now.
    """

    def __init__(self, link: Link, priority_age: float) -> None:
        super().__init__()
        self.statistics: dict[str, Statistics] = {}
        self.elsewhere: Outcomes = Counter()
        self._link = link
        self._priority_age = priority_age
        self._devices: dict[tuple[str, str], DeviceLoad] = {}

    def __repr__(self) -> str:
        return f"<Lines: {sorted(self)}>"

    def open(self, deployment: Deployment, version: Version) -> Line:
        """Begin to serve a version.

        Raises
        ------
        ValueError
            If its placement cannot be found.
        """
        counts = self.statistics.get(deployment.name, Statistics())
        line = Line(deployment, version, self._link, self._priority_age, counts)
        self[deployment.name, version.version] = line
        self.statistics[deployment.name] = counts
        return line

    def forget(self, name: str) -> None:
        """Drop the counters of a deployment; who still ends is counted elsewhere."""
        counts = self.statistics.pop(name, None)
        if counts is not None:
            counts.outcomes = self.elsewhere

    def device(self, address: str, device_class: str) -> DeviceLoad:
        """What a worker has before it, the same for the lines of all deployments."""
        found = self._devices.get((address, device_class))
        if found is None:
            beside = next(
                (d for d in self._devices.values() if d.name == address), None
            )
            found = DeviceLoad(address, device_class, beside)
            self._devices[address, device_class] = found
        return found

    def forget_worker(self, address: str) -> None:
        """Send nothing more to a worker."""
        for line in self.values():
            if line.devices.pop(address, None) is not None:
                line.latency.forget(address)
            line.used.pop(address, None)
        for key in [key for key in self._devices if key[0] == address]:
            del self._devices[key]

    def of(self, name: str) -> list[Line]:
        """Those of all versions of a deployment."""
        return [line for line in self.values() if line.name == name]

    def holding(self, request: Request, line: Line) -> Line:
        """Who serves a request by now that had been sent by a line."""
        if request.queue is line.queue:
            return line
        return next((o for o in self.values() if o.queue is request.queue), line)

    def rest(self, name: str, now: float) -> float:
        """For how many seconds no cache of a deployment is worth asking."""
        return min((line.hit_gate.rest(now) for line in self.of(name)), default=0.0)

    def busy(self) -> list[Line]:
        """Those with requests that wait."""
        return [line for line in self.values() if line.queue.count]

    def waiting(self, name: str) -> int:
        """How many requests of a deployment wait for a batch, of all versions."""
        return sum(len(line.queue) + line.delayed for line in self.of(name))

    def waiting_seconds(self) -> float:
        """Device time that the waiting requests need, over all devices."""
        return sum(line.waiting_seconds() for line in self.busy())
