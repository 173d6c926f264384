"""Devices that are kept free for batches which run isolated.

Such a batch needs an idle device, and under load none ever is: the next batch is on
its way before the last has ended. So one device takes no others until it is idle.

Pure: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from scheduler_plugins.load import DeviceLoad, Link


class Reservations:
    """Which device is kept for which lane.

    Examples
    --------
    >>> a, b = DeviceLoad("tcp://a:1", "cpu"), DeviceLoad("tcp://b:1", "cpu")
    >>> kept = Reservations()
    >>> kept.keep("lane", [a, b], now=0.0, link=Link())
    >>> kept.open_to("lane", [a, b]) == [a, b], kept.open_to(None, [a, b]) == [b]
    (True, True)
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, DeviceLoad] = {}
        self._asked: set[Hashable] = set()

    def __repr__(self) -> str:
        return f"<Reservations of {len(self._kept)} devices>"

    def __len__(self) -> int:
        return len(self._kept)

    def open_to(
        self, lane: Hashable | None, devices: Sequence[DeviceLoad]
    ) -> list[DeviceLoad]:
        """Those of the devices that are not kept for another lane."""
        # By name: what a worker has for other classes of devices waits there as well.
        others = [device.name for key, device in self._kept.items() if key != lane]
        return [device for device in devices if device.name not in others]

    def keep(
        self, lane: Hashable, devices: Sequence[DeviceLoad], now: float, link: Link
    ) -> None:
        """Keep the device that will be idle first, or the one that is kept already."""
        self._asked.add(lane)
        if devices and self._kept.get(lane) not in devices:
            self._kept[lane] = min(devices, key=lambda d: d.expected_free(now, link))

    def begin(self) -> None:
        """All lanes are about to be asked."""
        self._asked.clear()

    def release(self) -> bool:
        """Let go of what no lane has asked for since; tell whether there was any."""
        stale = self._kept.keys() - self._asked
        for lane in stale:
            del self._kept[lane]
        return bool(stale)
