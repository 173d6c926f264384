from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from daskinfer.policy import BatchPolicy
from daskinfer.timing.latency import LatencyModel
from scheduler_plugins.batching import Batcher, Send, Wait
from scheduler_plugins.holding import ArrivalRate
from scheduler_plugins.load import DeviceLoad, Flight, Link
from scheduler_plugins.placement import LeastLoaded, Placement, RoundRobin

STEEP = [(2**i, 0.020 + 0.0005 * 2**i) for i in range(7)]


class Bench:
    """A batcher, its devices and what has happened to them."""

    def __init__(
        self,
        devices: int = 1,
        timings: Sequence[tuple[int, float]] = STEEP,
        placement: Placement | None = None,
        **fields: Any,
    ) -> None:
        policy = BatchPolicy(**fields)
        latency = LatencyModel(policy.max_batch_size, policy.allowed_batch_sizes)
        self.devices = [DeviceLoad(f"device-{i}", "npu") for i in range(devices)]
        for device in self.devices:
            latency.seed(device.name, "npu", timings)
        self.latency = latency
        self.batcher = Batcher(policy, latency, placement or LeastLoaded(), Link())
        self.names = 0

    def decide(
        self, waiting: int, now: float, oldest: float | None = None, **more: Any
    ) -> Send | Wait:
        return self.batcher.decide(
            now,
            waiting=waiting,
            oldest=now if oldest is None else oldest,
            devices=self.devices,
            **more,
        )

    def send(self, waiting: int, now: float, **more: Any) -> Send:
        decision = self.decide(waiting, now, **more)
        assert isinstance(decision, Send), decision
        return decision

    def sent(self, send: Send, now: float) -> str:
        self.names += 1
        self.batcher.sent(send, f"batch-{self.names}", now)
        return f"batch-{self.names}"


def test_nothing_waits_or_nobody_is_there() -> None:
    bench = Bench()
    assert bench.decide(0, 1.0) == Wait(None)
    bench.devices = []
    assert bench.decide(5, 1.0) == Wait(None)


def test_an_idle_device_is_served_at_once_and_a_busy_one_just_in_time() -> None:
    bench = Bench()
    send = bench.send(5, 10.0)
    assert (send.rows, send.reason) == (5, "idle")
    bench.sent(send, 10.0)
    wait = bench.decide(3, 10.001)
    free = bench.devices[0].expected_free(10.001, Link())
    assert wait == Wait(pytest.approx(free - 0.004))
    assert isinstance(wait, Wait)
    assert wait.until is not None
    again = bench.send(3, wait.until)
    assert (again.rows, again.reason) == (3, "prefetch")
    bench.sent(again, wait.until)
    assert bench.decide(60, wait.until) == Wait(None)


def test_a_full_batch_does_not_wait_for_the_right_moment() -> None:
    bench = Bench()
    bench.sent(bench.send(64, 10.0), 10.0)
    assert bench.send(200, 10.0).reason == "full"


def test_the_minimum_is_held_once_from_the_first_arrival() -> None:
    bench = Bench(min_batch_size=8, max_wait="5ms")
    assert bench.decide(1, 100.0, oldest=100.0) == Wait(100.005)
    assert bench.decide(7, 100.003, oldest=100.0) == Wait(100.005)
    send = bench.send(7, 100.005, oldest=100.0)
    assert (send.rows, send.reason) == (7, "timeout")
    assert bench.send(8, 100.001, oldest=100.0).rows == 8


def test_a_minimum_is_a_lower_bound_of_the_size_too() -> None:
    # Two idle devices would share what waits.
    assert Bench(2).send(12, 10.0).rows < 12
    assert Bench(2, min_batch_size=12).send(12, 10.0).rows == 12


def test_the_maximum_is_a_limit_whatever_is_measured() -> None:
    bench = Bench(max_batch_size=10, timings=STEEP[:4])
    assert bench.send(500, 10.0).rows <= 10
    assert Bench(max_batch_size=10, timings=[]).send(500, 10.0).rows == 1


def test_unmeasured_devices_get_one_small_batch() -> None:
    bench = Bench(timings=[])
    send = bench.send(100, 10.0)
    assert (send.rows, send.probe, send.reason) == (1, True, "probe")
    bench.sent(send, 10.0)
    assert bench.decide(99, 10.0) == Wait(None)
    sized = Bench(timings=[], allowed_batch_sizes=(4, 8))
    assert sized.send(100, 10.0).rows == 4


def test_larger_sizes_are_explored_while_there_is_a_queue() -> None:
    bench = Bench(timings=STEEP[:4])
    send = bench.send(1000, 10.0)
    assert (send.rows, send.probe) == (32, True)
    name = bench.sent(send, 10.0)
    second = bench.send(968, 10.0)
    assert (second.rows, second.probe) == (8, False)
    bench.batcher.completed(name, bench.devices[0], [(32, 0.036)], 10.041)
    assert bench.send(968, 10.042).rows == 64
    assert not bench.send(8, 10.042).probe


def test_alone_means_nothing_before_and_nothing_behind() -> None:
    bench = Bench(2)
    busy, idle = bench.devices
    busy.send(Flight("x", 8, 10.0, lambda: 0.001))
    send = bench.send(1, 10.0, alone=True)
    assert (send.device, send.rows, send.reason) == (idle, 1, "alone")
    bench.sent(send, 10.0)
    assert bench.decide(1, 10.0, alone=True) == Wait(None)
    busy.send(Flight("y", 8, 10.0, lambda: 0.001))
    # However long it takes, nobody else follows it.
    assert bench.decide(500, 11.0) == Wait(None)


def test_alone_ignores_the_minimum() -> None:
    bench = Bench(min_batch_size=8)
    assert bench.send(1, 10.0, alone=True).rows == 1


def test_moving_the_inputs_counts() -> None:
    bench = Bench(2)
    near = bench.devices[1]
    for _ in range(2):
        send = bench.send(
            1, 10.0, transfer=lambda device: 0.0 if device is near else 0.004
        )
        assert send.device is near


def test_a_busy_device_that_has_the_inputs_is_worth_waiting_for() -> None:
    bench = Bench(2)
    near, far = bench.devices
    near.send(Flight("x", 64, 10.0, lambda: 0.052))

    def transfer(device: DeviceLoad) -> float:
        return 0.0 if device is near else 1.0

    wait = bench.decide(1, 10.0, transfer=transfer)
    assert isinstance(wait, Wait)
    assert wait.until is not None
    assert 10.0 < wait.until <= 10.052
    assert bench.send(1, 10.052, transfer=transfer).device is near
    # Not for ever: overdue, it is believed to need longer than the way there.
    assert bench.send(1, 14.0, transfer=transfer).device is far
    # Nor if the inputs are small.
    assert bench.send(1, 10.0, transfer=lambda device: 1e-6).device is far


def test_a_fast_busy_device_is_worth_waiting_for() -> None:
    bench = Bench()
    slow = DeviceLoad("slow", "cpu")
    bench.latency.seed("slow", "cpu", [(n, 10 * t) for n, t in STEEP])
    bench.devices.append(slow)
    bench.sent(bench.send(1, 10.0), 10.0)
    assert isinstance(bench.decide(1, 10.0), Wait)


def test_microseconds_make_no_device_a_faster_one() -> None:
    tiny = [(n, 1e-4 + 1e-6 * n) for n in (1, 8, 64)]
    bench = Bench(timings=tiny)
    noisy = DeviceLoad("noisy", "cpu")
    bench.latency.seed("noisy", "cpu", [(n, 3 * t) for n, t in tiny])
    bench.devices.append(noisy)
    for name in ("a", "b"):
        bench.devices[0].send(Flight(name, 1, 9.9975, lambda: 1e-4))
    assert bench.send(8, 10.0).device is noisy


def test_round_robin_does_not_wait_for_the_fast() -> None:
    bench = Bench(placement=RoundRobin())
    slow = DeviceLoad("slow", "cpu")
    bench.latency.seed("slow", "cpu", [(n, 10 * t) for n, t in STEEP])
    bench.devices.append(slow)
    devices = []
    for _ in range(2):
        send = bench.send(1, 10.0)
        bench.sent(send, 10.0)
        devices.append(send.device.name)
    assert devices == ["device-0", "slow"]


def test_equal_devices_are_loaded_equally() -> None:
    bench = Bench(4)
    for waiting in (400, 336, 272, 208):
        bench.sent(bench.send(waiting, 10.0), 10.0)
    assert [len(device.flights) for device in bench.devices] == [1, 1, 1, 1]
    joined = DeviceLoad("joined", "npu")
    bench.devices.append(joined)
    assert bench.send(400, 10.0).device is joined


def test_several_passes_of_one_batch_are_learned_apart() -> None:
    bench = Bench()
    name = bench.sent(bench.send(12, 10.0), 10.0)
    bench.batcher.completed(name, bench.devices[0], [(8, 0.024), (4, 0.022)], 10.05)
    counts = {rows: count for rows, _, count in bench.latency.table("npu")}
    assert (counts[8], counts[4]) == (2, 2)
    assert bench.devices[0].idle


def test_lost_batches_teach_nothing() -> None:
    bench = Bench(timings=STEEP[:4])
    name = bench.sent(bench.send(1000, 10.0), 10.0)
    table = bench.latency.table("npu")
    bench.batcher.lost(name, bench.devices[0], 11.0)
    assert bench.devices[0].idle
    assert bench.latency.table("npu") == table
    assert bench.send(1000, 11.0).probe


def test_out_of_memory_lowers_the_limit() -> None:
    bench = Bench()
    name = bench.sent(bench.send(64, 10.0), 10.0)
    bench.batcher.out_of_memory(name, bench.devices[0], 64, 10.1)
    assert bench.devices[0].idle
    assert bench.send(64, 10.1).rows <= 32


def test_a_batch_may_turn_out_larger_than_decided() -> None:
    bench = Bench()
    bench.batcher.sent(bench.send(64, 10.0), "b", 10.0, rows=640)
    assert bench.devices[0].rows == 640
    free = bench.devices[0].expected_free(10.0, Link())
    assert free == pytest.approx(10.003 + 10 * 0.052, rel=0.001)


def test_best_size_for_a_display() -> None:
    assert Bench().batcher.best_size("npu") == 64
    assert Bench(timings=[]).batcher.best_size("npu") == 1


def test_arrival_rate_before_and_long_after() -> None:
    rate = ArrivalRate()
    assert rate.at(5.0) == 0
    rate.arrived(10, 5.0)
    assert rate.at(5.1) > 50
    assert rate.at(15.0) < 1e-6


def test_repr() -> None:
    bench = Bench()
    assert "Batcher" in repr(bench.batcher)
    assert "LeastLoaded" in repr(bench.batcher)
