"""Which devices may be given what: those that are fit, and those on trial."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, cast

from scheduler_plugins.batching import Send
from scheduler_plugins.line import LaneKey

if TYPE_CHECKING:
    from scheduler_plugins.admission import Admission
    from scheduler_plugins.line import Line
    from scheduler_plugins.load import DeviceLoad, Link
    from scheduler_plugins.queueing import Lane
    from scheduler_plugins.reserving import Reservations


class Fitness:
    """Tells the devices that may be given a batch from those that may not.

    Parameters
    ----------
    lines
        All versions in service.
    admission
        Knows which devices a request may use.
    link
        What messages take.

    Attributes
    ----------
    stuck
        Devices that get nothing until they answer.
    """

    def __init__(
        self, lines: Collection[Line], admission: Admission, link: Link
    ) -> None:
        self.stuck: list[DeviceLoad] = []
        self._lines = lines
        self._admission = admission
        self._link = link

    def __repr__(self) -> str:
        return f"<Fitness stuck: {self.stuck}>"

    def freed(self, address: str) -> None:
        """The devices of a worker are not stuck any more, or gone."""
        self.stuck = [device for device in self.stuck if device.name != address]

    def fit(self, line: Line, running: Collection[str], now: float) -> list[DeviceLoad]:
        """The devices of a version that may be given any batch."""
        ready = [d for address, d in line.devices.items() if address in running]
        if line.health.is_perfect and not self.stuck:
            return ready
        return [d for d in ready if not d.stuck and line.health.admits(d.name)]

    def rested(self, line: Line, fit: list[DeviceLoad], now: float) -> list[DeviceLoad]:
        """Those that it is the turn of; all of them if it is nobody's.

        One that fails fast looks idle. It gets its share, and no more.
        """
        if line.health.is_perfect:
            return fit
        return [d for d in fit if not line.health.rests(d.name, now)] or fit

    def trial(
        self,
        line: Line,
        lanes: Iterable[Lane],
        running: Collection[str],
        now: float,
        reserved: Reservations,
    ) -> tuple[Lane, Send] | None:
        """Find one request for a device that may be well again."""
        if not line.health.breakers:
            return None
        fit = self.fit(line, running, now)
        for address in line.health.candidates(now):
            device = line.devices.get(address)
            if device is None or device.stuck or address not in running:
                continue
            for lane in lanes:
                isolated = cast(LaneKey, lane.key).group is not None
                # Who might kill a worker, or take too long, proves nothing.
                if isolated and self._admission.devices(lane, fit, []):
                    continue
                if device not in self._admission.devices(lane, [device], fit):
                    continue
                if device.takes_more(isolated):
                    return lane, Send(device, 1, False, "alone" if isolated else "try")
                if isolated and reserved.open_to(lane, [device]):
                    reserved.keep(lane, [device], now, self._link)
        return None

    def others(self, line: Line, running: Collection[str]) -> list[str]:
        """The workers that may serve the requests of a version, sooner or later.

        Also those whose breakers are not closed: nobody would try them if all who
        could wait behind a device that does not answer; and those that would have to
        load it first. The version itself may have been replaced.
        """
        serving = [other for other in self._lines if other.name == line.name]
        found = line if line in serving or not serving else serving[-1]
        stuck = {device.name for device in self.stuck}
        return [
            address
            for address in (*found.devices, *found.cold)
            if address in running and address not in stuck
        ]
