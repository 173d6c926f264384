"""Mistakes that batching policies have been seen to make; each has a test."""

from __future__ import annotations

import pytest

from benchmarks.sim.arrivals import lumps, once, poisson
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.curves import CURVES
from benchmarks.sim.policies import foresight, learned
from benchmarks.sim.records import Batch, Result
from benchmarks.sim.scenarios import at_once, closed, load
from daskinfer.policy import BatchPolicy
from daskinfer.timing.latency import LatencyModel
from scheduler_plugins.batching import Batcher, Send
from scheduler_plugins.load import DeviceLoad, Flight, Link
from scheduler_plugins.placement import LeastLoaded


def cold(
    shape: str, slowness: tuple[float, ...] = (1.0,), **changes: object
) -> Cluster:
    curve = CURVES[shape]
    policy = learned(curve, slowness, warm=False)
    return Cluster(curve, policy, slowness, **changes)  # type: ignore[arg-type]


def first_send(cluster: Cluster, rows: int) -> Send:
    """What the policy of an idle, simulated cluster does with `rows` at once."""
    policy = cluster.policy
    policy.arrived(rows, 0.0)
    loads = [device.load for device in cluster.devices]
    decision = policy.decide(0.0, waiting=rows, oldest=0.0, devices=loads)
    assert isinstance(decision, Send)
    return decision


def test_prefetch_is_just_in_time_every_time() -> None:
    # Predicting from send times alone would let the errors add up.
    result = load("steep", "daskinfer", 0.8, count=30_000)
    prefetched = [
        batch
        for batch in result.batches
        if batch.reason == "prefetch" and batch.predecessor_ends is not None
    ]
    assert len(prefetched) > 500
    early = [batch.predecessor_ends - batch.sent for batch in prefetched[20:]]
    assert max(early) <= 0.005
    assert min(early) >= 0.0025


def test_no_size_is_over_four_times_the_largest_answered() -> None:
    for shape in ("cpu", "steep", "knee"):
        batches = cold(shape).run(once(10_000)).batches
        for batch in batches:
            assert batch.rows <= 4 * largest_answered(batches, batch.sent)


def largest_answered(batches: list[Batch], now: float) -> int:
    answered = [batch.rows for batch in batches if batch.answered <= now]
    return max(answered, default=1)


def test_few_callers_do_not_stay_at_single_rows() -> None:
    sizes = cold("steep").run_closed(4, 1000).sizes[50:]
    assert sum(sizes) / len(sizes) > 1.5


def test_many_callers_get_large_sizes_tried() -> None:
    # Prefetching the best size so far keeps the queue short: 16 for ever.
    assert 64 in cold("steep").run_closed(128, 6000).sizes[:100]


def test_slow_first_calls_are_forgotten() -> None:
    slow = cold("steep", first_call=100.0).run_closed(64, 4000).sizes
    warm = closed("steep", "daskinfer", 64, count=4000).sizes
    later, usual = slow[30:], warm[30:]
    assert sum(later) / len(later) == pytest.approx(sum(usual) / len(usual), rel=0.2)


def test_a_size_never_measured_holds_nothing_back() -> None:
    # Only full batches were seen; any line through one point can be drawn.
    latency = LatencyModel(64)
    for _ in range(50):
        latency.observe("a", "npu", 64, 0.052)
    batcher = Batcher(BatchPolicy(), latency, LeastLoaded(), Link())
    device = DeviceLoad("a", "npu")
    batcher.arrived(1, 10.0)
    decision = batcher.decide(10.0, waiting=1, oldest=10.0, devices=[device])
    assert isinstance(decision, Send)
    assert decision.rows == 1


def test_a_burst_does_not_collapse_a_curve_that_falls_again() -> None:
    # Greedy serves 2,542 rows/s at its maximum of 512: less than what arrives.
    curve = CURVES["cpu"]
    rate = 0.8 * curve.capacity()

    def arrivals() -> list[tuple[float, tuple[int, ...]]]:
        return [(0.0, (1,) * 5000), *poisson(rate, 32_000)]

    result = Cluster(curve, learned(curve)).run(arrivals())
    assert len(result.latencies) == 37_000
    last = result.latencies[-2000:]
    assert sum(last) / len(last) < 0.06


@pytest.mark.parametrize(
    ("waiting", "rows"), [(9, 8), (10, 8), (11, 8), (12, 8), (14, 14), (15, 15)]
)
def test_padding_only_where_it_pays(waiting: int, rows: int) -> None:
    curve = CURVES["sizes"]
    assert first_send(Cluster(curve, foresight(curve)), waiting).rows == rows


def test_a_size_worse_than_two_halves_is_not_used() -> None:
    curve = CURVES["step"]
    assert first_send(Cluster(curve, foresight(curve)), 32).rows == 16
    sizes = Cluster(curve, learned(curve)).run(once(3200)).sizes
    assert sum(size > 16 for size in sizes) <= 0.03 * len(sizes)


def test_the_round_trip_counts_as_cost() -> None:
    # By execution time alone, single rows look fine: 0.35 ms against a trip of 5 ms.
    result = load("tiny", "daskinfer", 0.3, count=20_000)
    assert sum(result.sizes) / len(result.sizes) > 5
    assert result.mean() < 0.020


def test_a_factor_per_device_separates_what_shares_a_table() -> None:
    curve, slowness = CURVES["steep"], (1.0, 1.0, 3.0, 3.0)
    cluster = Cluster(
        curve, learned(curve, slowness, warm=False), slowness, one_class=True
    )
    result = cluster.run(once(12_000))
    assert len(result.batches) > 200
    policy = cluster.policy
    assert isinstance(policy, Batcher)
    for device in cluster.devices:
        predicted = policy.latency.seconds(device.load.name, "all", 8)
        assert predicted == pytest.approx(device.slowness * curve.at(8), rel=0.10)


def test_slow_idle_devices_take_no_share_of_a_batch() -> None:
    curve, slowness = CURVES["steep"], (1.0, 3.0)
    decision = first_send(Cluster(curve, foresight(curve, slowness), slowness), 30)
    assert decision.device.name == "device-0"
    assert decision.rows == 30


def test_exploring_is_paid_for_once_however_many_devices() -> None:
    slowness = (1.0,) * 16
    result = cold("knee", slowness).run(once(40_000))
    rate = CURVES["knee"].capacity()
    loss = sum(
        batch.seconds - batch.rows / rate for batch in result.batches if batch.probe
    )
    assert loss <= 0.05 * 16 * result.makespan


def test_a_target_below_the_load_is_let_go() -> None:
    curve = CURVES["steep"]
    policy = BatchPolicy(max_batch_size=64, target_latency=0.030)
    arrivals = poisson(0.8 * curve.capacity(), 5000)
    held = Cluster(curve, learned(curve, policy=policy)).run(arrivals)
    free = load("steep", "daskinfer", 0.8)
    assert held.mean() <= 1.5 * free.mean()


def test_a_target_limits_batches_while_it_can_be_kept() -> None:
    curve = CURVES["steep"]
    policy = BatchPolicy(max_batch_size=64, target_latency=0.030)
    arrivals = poisson(0.3 * curve.capacity(), 3000)
    held = Cluster(curve, learned(curve, policy=policy), noise=0.0).run(arrivals)
    kept = sum(batch.seconds <= 0.0301 for batch in held.batches)
    assert kept >= 0.95 * len(held.batches)


def test_the_backlog_of_a_cold_start_drains() -> None:
    curve = CURVES["steep"]
    rate = 0.8 * curve.capacity()
    result = cold("steep").run(poisson(rate, 8000))
    warm = load("steep", "daskinfer", 0.8, count=8000)
    late = slice(int(2 * rate), None)
    assert mean_of(result, late) <= 1.1 * mean_of(warm, late)


def mean_of(result: Result, part: slice) -> float:
    latencies = result.latencies[part]
    return sum(latencies) / len(latencies)


def test_no_window_for_all() -> None:
    slowness = (1.0,) * 16
    ours = load("cpu", "daskinfer", 0.3, slowness)
    window = load("cpu", "5 ms window", 0.3, slowness)
    assert ours.mean() < 0.6 * window.mean()


def test_messages_of_many_requests_are_decided_on_whole() -> None:
    curve = CURVES["steep"]
    result = Cluster(curve, learned(curve)).run(lumps(0.1 * curve.capacity(), 960))
    assert set(result.sizes) <= {32, 64}


def test_what_is_known_to_take_the_same_time_is_one_batch() -> None:
    for waiting in (130, 134, 140, 255, 256):
        assert at_once("constant", "daskinfer", waiting).sizes == [waiting]


def test_a_batch_that_hangs_elsewhere_is_no_reason_to_wait() -> None:
    # Its device would be free later and later; starts must not be spread to that.
    latency, link = LatencyModel(64), Link()
    hung, idle = DeviceLoad("a", "npu"), DeviceLoad("b", "npu")
    for device in (hung, idle):
        latency.seed(device.name, "npu", [(1, 0.020), (64, 0.052)])
    hung.send(Flight("stuck", 64, 0.0, lambda: 0.052))
    batcher = Batcher(BatchPolicy(), latency, LeastLoaded(), link)
    now = 600.0
    batcher.arrived(1, now)
    waited = 0.0
    while True:
        decision = batcher.decide(now, waiting=1, oldest=600.0, devices=[hung, idle])
        if isinstance(decision, Send):
            break
        assert decision.until is not None
        now, waited = decision.until, decision.until - 600.0
    assert decision.device is idle
    assert waited <= 0.060


def test_a_device_that_was_slow_for_a_while_gets_work_again() -> None:
    curve, slowness = CURVES["steep"], (1.0, 1.0)

    def change(device: int, now: float) -> float:
        return 10.0 if device == 0 and 5.0 <= now < 15.0 else 1.0

    result = Cluster(curve, learned(curve, slowness), slowness, change=change).run(
        poisson(60.0, 15_000)
    )
    shares = [
        sum(
            batch.rows
            for batch in result.batches
            if batch.device.load.name == "device-0" and start <= batch.sent < start + 10
        )
        for start in (8, 200)
    ]
    assert shares[0] < 60
    assert shares[1] > 200
