"""How fast devices advance requests that are answered step by step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Pace"]

#: Requests that a worker is given before it has said how many it steps together.
FIRST_SLOTS = 8
#: Of those that wait on a worker, so that a place which is free is taken at once.
AHEAD = 1 / 8
#: Seconds of a step, and steps of a request, that nothing is known of.
_UNKNOWN_SECONDS = 0.005
_UNKNOWN_STEPS = 32.0
#: The share of the latest request in the mean.
_WEIGHT = 0.05
#: Devices whose expected finish is within this share of the best are as good.
_AS_GOOD = 1.1


class Pace:
    """What is known of the steps of one version.

    All requests that a device has advance at each of its steps. So what a request takes
    there is its number of steps, times what a step takes: it is steps that are counted,
    and no requests. How many steps there will be is learned from those that have ended.

    Examples
    --------
    >>> pace = Pace()
    >>> pace.told("tcp://10.0.0.1:1", slots=16, seconds=0.010)
    >>> pace.told("tcp://10.0.0.2:1", slots=16, seconds=0.500)
    >>> pace.room("tcp://10.0.0.1:1")
    18
    >>> pace.best({"tcp://10.0.0.1:1": 5, "tcp://10.0.0.2:1": 0})
    ['tcp://10.0.0.1:1']
    """

    def __init__(self) -> None:
        self.steps = _UNKNOWN_STEPS
        self._ended = 0
        self._slots: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Pace steps: {self.steps:.1f} slots: {self._slots}>"

    # Learning

    def told(self, address: str, slots: int, seconds: float) -> None:
        """A worker says how many requests step together, and how long a step takes."""
        self._slots[address] = slots
        self._seconds[address] = seconds

    def ended(self, steps: int) -> None:
        """A request has ended after so many steps."""
        self._ended += 1
        self.steps += max(_WEIGHT, 1 / self._ended) * (steps - self.steps)

    def forget(self, address: str) -> None:
        """A worker is gone."""
        self._slots.pop(address, None)
        self._seconds.pop(address, None)

    # Asking

    def slots(self, address: str) -> int:
        """How many requests step together on a worker."""
        return self._slots.get(address, FIRST_SLOTS)

    def room(self, address: str) -> int:
        """How many requests a worker is given, those included that wait for a slot."""
        slots = self.slots(address)
        return slots + max(int(slots * AHEAD), 1)

    def seconds(self, address: str) -> float:
        """What a step takes on a worker; on the fastest where that is not known."""
        known = min(self._seconds.values(), default=_UNKNOWN_SECONDS)
        return self._seconds.get(address, known)

    def finish(self, address: str, live: int) -> float:
        """Seconds until a request that is sent now will have ended.

        Where all slots are taken, it waits until as many have ended as are before it:
        of so many requests, one ends every so many steps.
        """
        slots = self.slots(address)
        waits = max(live - slots + 1, 0) / slots
        return (1.0 + waits) * max(self.steps, 1.0) * self.seconds(address)

    def best(self, live: Mapping[str, int]) -> list[str]:
        """Who should take the next request; nobody, where it pays to wait.

        Parameters
        ----------
        live
            By worker, the requests that it has.

        Returns
        -------
        list of str
            Workers with room that finish as early as any, those with the fewest
            requests; empty if those who do have no room.
        """
        finish = {address: self.finish(address, n) for address, n in live.items()}
        earliest = min(finish.values(), default=0.0)
        free = [
            address
            for address, n in live.items()
            if n < self.room(address) and finish[address] <= _AS_GOOD * earliest
        ]
        fewest = min((live[address] for address in free), default=0)
        return [address for address in free if live[address] == fewest]

    def waiting_seconds(self, requests: int, addresses: Sequence[str]) -> float:
        """Device time that so many requests need, on devices such as these."""
        each = [self.seconds(a) / max(self.slots(a), 1) for a in addresses]
        mean = sum(each) / len(each) if each else _UNKNOWN_SECONDS / FIRST_SLOTS
        return requests * max(self.steps, 1.0) * mean
