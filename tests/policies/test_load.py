from __future__ import annotations

import pytest

from scheduler_plugins.load import DeviceLoad, Flight, Link


@pytest.fixture
def device() -> DeviceLoad:
    return DeviceLoad("tcp://10.0.0.1:1", "npu")


def flight(name: str, sent_at: float, seconds: float, rows: int = 8) -> Flight:
    return Flight(name, rows, sent_at, lambda: seconds)


def test_batches_run_one_after_the_other(device: DeviceLoad) -> None:
    link = Link(0.003, 0.005)
    device.send(flight("1", 10.0, 0.020))
    assert device.expected_free(10.0, link) == pytest.approx(10.023)
    device.send(flight("2", 10.015, 0.030))
    assert device.expected_free(10.016, link) == pytest.approx(10.053)
    assert device.rows == 16


def test_an_answer_sets_the_clock_right(device: DeviceLoad) -> None:
    link = Link(0.003, 0.005)
    device.send(flight("1", 10.0, 0.020))
    device.send(flight("2", 10.015, 0.030))
    # It took 7 ms longer than predicted; the next batch began as it ended.
    done = device.finish("1", 10.032, link)
    assert done is not None
    assert done.batch_id == "1"
    assert device.expected_free(10.032, link) == pytest.approx(10.060)


def test_predictions_are_asked_again(device: DeviceLoad) -> None:
    link, seconds = Link(), [0.020]
    device.send(Flight("1", 8, 10.0, lambda: seconds[0]))
    seconds[0] = 0.2
    assert device.expected_free(10.0, link) == pytest.approx(10.203)


def test_a_batch_that_should_be_over_ends_any_moment_then_is_overdue(
    device: DeviceLoad,
) -> None:
    link = Link(0.003, 0.005)
    device.send(flight("1", 10.0, 0.100))
    assert device.expected_free(10.110, link) == pytest.approx(10.110)
    assert device.expected_free(10.203, link) == pytest.approx(10.303)


def test_unknown_batches_are_no_error(device: DeviceLoad) -> None:
    assert device.finish("never sent", 1.0, Link()) is None
    assert device.idle


def test_link_learns_and_clips_outliers() -> None:
    link = Link(0.003, 0.005)
    link.observe(100.0)
    assert link.round_trip < 0.006
    for _ in range(300):
        link.observe(0.010)
    assert link.round_trip == pytest.approx(0.010, rel=0.01)
    assert link.outbound + link.inbound == pytest.approx(link.round_trip)
    for _ in range(1000):
        link.observe(-1.0)
    assert link.round_trip > 0


@pytest.mark.parametrize(("outbound", "trip"), [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0)])
def test_a_link_needs_two_ways(outbound: float, trip: float) -> None:
    with pytest.raises(ValueError, match="outbound"):
        Link(outbound, trip)


def test_repr(device: DeviceLoad) -> None:
    device.send(flight("1", 10.0, 0.020))
    assert repr(device) == (
        "<DeviceLoad tcp://10.0.0.1:1 npu: batches under way: 1 rows: 8>"
    )
    assert repr(Link()) == "<Link outbound=3.00ms round_trip=5.00ms>"
