"""What each device is doing, and when it will be free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from daskinfer.protocol import CACHE, INPUTS
from scheduler_plugins.link import Link

__all__ = ["FETCHING", "IN_FLIGHT", "MARGIN", "DeviceLoad", "Flight", "Link"]

#: One batch runs while the next is on its way; more would only make batches small.
IN_FLIGHT = 2
#: Batches that wait for their inputs beside those.
FETCHING = 4
#: Seconds before a device is free that its next batch should be there. Late is far
#: worse than early, and a share of the batch's time on top is worse than none.
MARGIN = 0.001

# A batch counts as overdue when it is late by this share of its predicted time
# and by two round trips on top; less than that is noise.
_OVERDUE = 0.2


@dataclass(slots=True, eq=False)
class Flight:
    """One batch that was sent to a device and is not answered yet.

    Parameters
    ----------
    batch_id : str
        Name of the batch, unique among the flights of its device.
    rows : int
        Rows in the batch, padding not counted.
    sent_at : float
        When it was sent, in seconds on a monotonic clock.
    seconds : callable
        The current prediction of its execution time in seconds. A function, because
        the prediction changes while the batch is on its way.
    alone : bool
        Nothing may be queued behind it on the device.

    Attributes
    ----------
    waits_since : float or None
        Since when it waits for something else than the batches before it, as the
        worker has said; None while it does not.
    waits_for : str
        For what: see :data:`daskinfer.protocol.INPUTS`. It does not keep the device
        from others while it waits for inputs.
    begun_at : float or None
        When it began after such a wait; None if there was none.
    lookups : int
        How many of its requests are being looked up in the worker's cache, beside what
        the device does; 0 for a batch that is to be computed.
    """

    batch_id: str
    rows: int
    sent_at: float
    seconds: Callable[[], float]
    alone: bool = False
    waits_since: float | None = None
    waits_for: str = ""
    begun_at: float | None = None
    lookups: int = 0


@dataclass(slots=True)
class _Clock:
    free_at: float = 0.0


class DeviceLoad:
    """The batches that one worker's device has before it, of all deployments.

    A device runs its batches one after the other, in the order in which they were
    sent.

    Parameters
    ----------
    name : str
        Address of the worker.
    device_class : str
        Devices of one class are expected to take the same time for the same batch.
    beside : DeviceLoad, optional
        Another device of the same worker, which runs the batches of all its devices
        one after the other.

    Notes
    -----
    Not thread-safe; it lives on the scheduler's event loop.

    Attributes
    ----------
    flights
        What the worker has, in the order in which it will run.
    fetching
        What waits for its inputs there, and does not keep the device from others.
    looked_up
        What should be in the worker's cache, and needs no device.
    stuck
        By batch, why the device gets no others until that is answered.

    Examples
    --------
    >>> device, link = DeviceLoad("tcp://10.0.0.1:1", "npu"), Link()
    >>> device.send(Flight("b1", 8, 1.0, lambda: 0.020))
    >>> round(device.expected_free(1.0, link), 3)
    1.023
    >>> device.finish("b1", 1.030, link).rows, device.idle
    (8, True)
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "device_class",
        "fetching",
        "flights",
        "last_sent",
        "looked_up",
        "name",
        "stuck",
    )

    def __init__(
        self, name: str, device_class: str, beside: DeviceLoad | None = None
    ) -> None:
        self.name = name
        self.device_class = device_class
        self.last_sent = float("-inf")
        self.flights: list[Flight] = [] if beside is None else beside.flights
        self.fetching: list[Flight] = [] if beside is None else beside.fetching
        self.stuck: dict[str, str] = {} if beside is None else beside.stuck
        self.looked_up: list[Flight] = [] if beside is None else beside.looked_up
        self._clock: _Clock = _Clock() if beside is None else beside._clock

    @property
    def under_way(self) -> tuple[Flight, ...]:
        """All that was sent to it and is not answered."""
        return (*self.flights, *self.fetching, *self.looked_up)

    @property
    def free_at(self) -> float:
        """When it was last known to be done with all before those."""
        return self._clock.free_at

    @property
    def idle(self) -> bool:
        """Whether it has no batch before it, but for those that wait for inputs."""
        return not self.flights

    @property
    def full(self) -> bool:
        """Whether it has as many batches as it should have at once."""
        return len(self.flights) >= IN_FLIGHT

    @property
    def fetches_enough(self) -> bool:
        """Whether so many wait for inputs that no more should that need any."""
        return len(self.fetching) >= FETCHING

    @property
    def isolated(self) -> bool:
        """Whether it has a batch that shares it with no other.

        Those that wait for inputs don't matter: it will be known what runs when.
        """
        return any(flight.alone for flight in self.flights)

    @property
    def lookups(self) -> int:
        """How many requests are being looked up."""
        return sum(flight.lookups for flight in self.looked_up)

    @property
    def running(self) -> Flight | None:
        """What it runs now, as far as can be known."""
        return next((f for f in self.flights if f.waits_since is None), None)

    @property
    def rows(self) -> int:
        """Rows of all batches under way."""
        return sum(flight.rows for flight in self.under_way)

    def takes_more(self, alone: bool = False) -> bool:
        """Whether one more batch may be sent; with ``alone``, one that shares nothing.

        >>> DeviceLoad("tcp://10.0.0.1:1", "npu").takes_more(alone=True)
        True
        """
        if alone:
            return not (self.flights or self.looked_up)
        return not (self.full or self.isolated)

    def send(self, flight: Flight) -> None:
        """Note that `flight` has left for this device."""
        self.flights.append(flight)
        self.last_sent = flight.sent_at

    def flight(self, batch_id: str) -> Flight | None:
        """A batch under way; None if none has this name."""
        return next((f for f in self.under_way if f.batch_id == batch_id), None)

    def look_up(self, flight: Flight) -> None:
        """Note that `flight` has left for this device's cache.

        >>> device, link = DeviceLoad("tcp://10.0.0.1:1", "npu"), Link()
        >>> device.look_up(Flight("b1", 8, 1.0, lambda: 0.020, lookups=8))
        >>> device.idle, device.lookups
        (True, 8)
        >>> device.not_found(device.flight("b1"), 1.010, link)
        >>> device.idle, device.lookups
        (False, 0)
        """
        flight.waits_for, flight.waits_since = CACHE, flight.sent_at
        self.looked_up.append(flight)

    def not_found(self, flight: Flight, now: float, link: Link) -> None:
        """A batch is not in the cache altogether: the device has to run it."""
        if flight in self.looked_up:
            self.looked_up.remove(flight)
            flight.waits_for, flight.waits_since, flight.lookups = "", None, 0
            flight.sent_at = now - link.round_trip
            self.flights.append(flight)

    def waits(self, batch_id: str, waits_for: str, now: float) -> None:
        """A batch cannot begin, and not because of those before it."""
        if (flight := self._take(batch_id)) is not None:
            flight.waits_for, flight.waits_since = waits_for, now
            (self.fetching if waits_for == INPUTS else self.flights).append(flight)

    def begun(self, batch_id: str, now: float, link: Link) -> None:
        """It has begun after that."""
        if (flight := self._take(batch_id)) is not None:
            flight.waits_for, flight.waits_since = "", None
            flight.begun_at = now - link.inbound
            # What was ahead of it has not begun.
            self.flights.insert(0, flight)

    def finish(
        self, batch_id: str, now: float, link: Link, *, ran: bool = True
    ) -> Flight | None:
        """Note that a batch was answered, or that no answer will come.

        Parameters
        ----------
        batch_id, now, link
            Which, the time, and what messages take.
        ran
            Whether the device had anything to do with it.

        Returns
        -------
        Flight or None
            What was under way; None if no batch of this name was.
        """
        first = next(iter(self.flights), None)
        flight = self._take(batch_id)
        if flight is not None and (ran or flight is first):
            # Predicting each batch from its own send time alone would add up the
            # errors of all its predecessors; the answer sets the clock right. One
            # that overtook others without having run tells nothing of the device.
            self._clock.free_at = now - link.inbound
        return flight

    def _take(self, batch_id: str) -> Flight | None:
        flight = self.flight(batch_id)
        if flight is not None:
            for flights in (self.flights, self.fetching, self.looked_up):
                if flight in flights:
                    flights.remove(flight)
        return flight

    def expected_free(self, now: float, link: Link) -> float:
        """When the device will have run all that was sent to it.

        A batch that should be over is believed to end any moment; once it is clearly
        overdue, to need half as long again as it has run.
        """
        free = self.free_at
        for flight in self.flights:
            if flight.waits_for == CACHE:
                # Nobody knows until when. The device is there for others meanwhile.
                continue
            start = max(free, flight.sent_at + link.outbound)
            seconds = flight.seconds()
            free = start + seconds
            if now > free:
                overdue = now - free > _OVERDUE * seconds + 2 * link.round_trip
                free = now + 0.5 * (now - start) if overdue else now
        return free

    def __repr__(self) -> str:
        return (
            f"<DeviceLoad {self.name} {self.device_class}: "
            f"batches under way: {len(self.flights)} rows: {self.rows}>"
        )
