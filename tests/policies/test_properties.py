"""What holds whatever arrives and whatever the devices are like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sim.arrivals import Arrival
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.curves import CURVES, Shape
from daskinfer.policy import BatchPolicy
from daskinfer.timing.latency import LatencyModel
from scheduler_plugins.batching import Batcher, Send, Wait
from scheduler_plugins.load import DeviceLoad, Flight, Link
from scheduler_plugins.placement import LeastLoaded, Placement, RoundRobin


class Watched(Batcher):
    """Checks each decision."""

    def decide(self, now: float, **situation: Any) -> Send | Wait:
        decision = super().decide(now, **situation)
        devices = situation["devices"]
        if isinstance(decision, Send):
            assert 1 <= decision.rows <= situation["waiting"]
            assert decision.rows <= self.policy.max_batch_size
            assert decision.device in devices
            assert len(decision.device.flights) < 2
        elif decision.until is not None:
            assert decision.until > now
        else:
            assert situation["waiting"] == 0 or not any(d.idle for d in devices)
        return decision


@st.composite
def policies(draw: st.DrawFn, shape: Shape) -> BatchPolicy:
    if shape.allowed:
        return BatchPolicy(
            allowed_batch_sizes=shape.allowed,
            min_batch_size=draw(st.integers(1, shape.max_rows)),
        )
    largest = draw(st.integers(1, min(shape.max_rows, 100)))
    smallest = draw(st.integers(1, largest))
    wait = draw(st.none() | st.floats(0, 0.2)) if smallest > 1 else None
    target = draw(st.none() | st.floats(0.001, 0.1))
    return BatchPolicy(
        max_batch_size=largest,
        min_batch_size=smallest,
        max_wait=wait,
        target_latency=target,
    )


arrivals = st.lists(
    st.tuples(
        st.floats(0, 0.3, allow_subnormal=False),
        st.lists(st.integers(1, 150), min_size=1, max_size=8).map(tuple),
    ),
    min_size=1,
    max_size=25,
)


def watched(
    policy: BatchPolicy, placement: type[Placement]
) -> Callable[[Sequence[DeviceLoad]], Watched]:
    latency = LatencyModel(policy.max_batch_size, policy.allowed_batch_sizes)
    return lambda devices: Watched(policy, latency, placement(), Link())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_row_is_answered_once_and_no_batch_is_too_large(
    data: st.DataObject,
) -> None:
    shape = CURVES[data.draw(st.sampled_from(sorted(CURVES)), "shape")]
    policy = data.draw(policies(shape), "policy")
    slowness = data.draw(
        st.lists(st.sampled_from([1.0, 3.0, 10.0]), min_size=1, max_size=4), "slowness"
    )
    cluster = Cluster(
        shape,
        watched(policy, data.draw(st.sampled_from([LeastLoaded, RoundRobin]))),
        slowness,
        noise=data.draw(st.sampled_from([0.0, 0.3])),
        out_of_memory=data.draw(st.none() | st.integers(1, 40)),
        one_class=data.draw(st.booleans()),
    )
    time, requests = 0.0, []
    for gap, rows in data.draw(arrivals, "arrivals"):
        time += gap
        requests.append((time, rows))
    result = cluster.run(requests)
    assert result.unanswered == 0
    assert len(result.latencies) == sum(len(rows) for _, rows in requests)
    assert sum(result.sizes) == sum(sum(rows) for _, rows in requests)
    assert max(result.sizes) <= policy.max_batch_size
    assert cluster.waiting == 0
    assert all(device.load.idle for device in cluster.devices)
    assert_no_request_waits_beside_an_idle_cluster(cluster, policy, requests)


def assert_no_request_waits_beside_an_idle_cluster(
    cluster: Cluster, policy: BatchPolicy, requests: list[Arrival]
) -> None:
    """Where all devices are idle, only `min_batch_size` may hold anything."""
    busy_until = 0.0
    unsent: list[float] = [time for time, rows in requests for _ in range(sum(rows))]
    sent = 0
    for batch in cluster.result.batches:
        if cluster.result.failures:
            return
        oldest = unsent[sent]
        earliest = max(oldest, busy_until)
        assert batch.sent <= earliest + policy.hold + 1e-6
        sent += batch.rows
        busy_until = max(busy_until, batch.answered)


@given(
    waiting=st.integers(1, 200),
    flights=st.lists(
        st.lists(st.floats(0.0001, 100.0), max_size=3), min_size=1, max_size=5
    ),
    age=st.floats(0, 1000),
    gaps=st.lists(st.floats(0, 1), max_size=20),
)
def test_an_idle_device_is_used_soon_whatever_the_others_do(
    waiting: int, flights: list[list[float]], age: float, gaps: list[float]
) -> None:
    # The other devices hold batches of other deployments, some of which hang.
    latency, link = LatencyModel(64), Link()
    devices = [DeviceLoad(f"device-{i}", "npu") for i in range(len(flights) + 1)]
    for device, batches in zip(devices, flights, strict=False):
        for i, seconds in enumerate(batches):
            device.send(Flight(f"{i}", 8, 1000.0 - age, lambda s=seconds: s))
    for device in devices:
        latency.seed(device.name, "npu", [(1, 0.020), (64, 0.052)])
    batcher = Watched(BatchPolicy(), latency, LeastLoaded(), link)
    now = 1000.0 - sum(gaps)
    for gap in gaps:
        batcher.arrived(1, now)
        now += gap
    batcher.arrived(waiting, now)
    start = now
    for _ in range(1000):
        decision = batcher.decide(now, waiting=waiting, oldest=start, devices=devices)
        if isinstance(decision, Send):
            break
        assert decision.until is not None
        now = decision.until
    assert isinstance(decision, Send)
    # No longer than a batch of the best size takes.
    assert now - start <= 0.060
