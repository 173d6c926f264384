"""What passes take of a device's memory, and asking before a size that is new."""

from __future__ import annotations

import pytest

from daskinfer.worker.footprint import Footprint

ALWAYS = 1000


class Device:
    """Has some room, and notes when it is asked and when it is watched."""

    def __init__(self, room: int) -> None:
        self.left = room
        self.held = 100
        self.most = 0
        self.asked = 0
        self.watched = 0

    def allocated(self) -> int:
        return self.held

    def room(self) -> int:
        self.asked += 1
        return self.left

    def reset_peak(self) -> None:
        self.watched += 1
        self.most = self.held

    def peak(self) -> int:
        return self.most


def run(footprint: Footprint, device: Device, rows: int, signature: str = "x") -> None:
    """A pass takes 10 bytes a row, and some in any case."""
    with footprint.of_pass(signature, rows):
        device.most = max(device.most, device.held + ALWAYS + 10 * rows)


def test_a_size_that_cannot_fit_is_not_tried():
    device = Device(room=ALWAYS + 150)
    footprint = Footprint(device)
    run(footprint, device, 2)
    run(footprint, device, 4)
    run(footprint, device, 15)
    with pytest.raises(MemoryError, match=r"16 rows would take about 1,160 bytes.*150"):
        run(footprint, device, 16)


def test_what_every_pass_takes_is_counted_once():
    device = Device(room=ALWAYS + 640)
    footprint = Footprint(device)
    for rows in (1, 2, 64):
        run(footprint, device, rows)
    assert device.asked == 2


def test_nothing_is_expected_of_one_size_but_that_more_takes_no_less():
    device = Device(room=ALWAYS + 40)
    footprint = Footprint(device)
    run(footprint, device, 4)
    run(footprint, device, 64)
    footprint = Footprint(device)
    run(footprint, device, 4)
    device.left -= 1
    with pytest.raises(MemoryError, match=r"64 rows would take about 1,040 bytes"):
        run(footprint, device, 64)


def test_sizes_that_fitted_are_neither_asked_for_nor_watched_again():
    device = Device(room=10_000)
    footprint = Footprint(device)
    run(footprint, device, 8)
    run(footprint, device, 16)
    assert (device.asked, device.watched) == (1, 2)
    device.left = 0
    for rows in (16, 8, 1):
        run(footprint, device, rows)
    assert (device.asked, device.watched) == (1, 2)


def test_a_mistake_does_not_stay():
    device = Device(room=2000)
    footprint = Footprint(device)
    run(footprint, device, 1)
    with footprint.of_pass("x", 2):
        # Meanwhile another model was loaded.
        device.most = device.held + 1900
    for rows in (64, 32):
        with pytest.raises(MemoryError):
            run(footprint, device, rows)
    for rows in (2, 64):
        run(footprint, device, rows)


def test_nothing_is_known_of_other_inputs():
    device = Device(room=0)
    footprint = Footprint(device)
    run(footprint, device, 4)
    run(footprint, device, 64, signature="y")


def test_a_pass_that_failed_teaches_nothing():
    device = Device(room=0)
    footprint = Footprint(device)
    with pytest.raises(ValueError), footprint.of_pass("x", 4):
        raise ValueError
    run(footprint, device, 64)
