"""Requests and the workers that have their results."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from daskinfer import BatchPolicy, CachePolicy
from daskinfer.cache import CacheKey
from scheduler_plugins.affinity import Affinity, is_faster
from scheduler_plugins.constraint import ANYWHERE
from scheduler_plugins.deployment import Deployment, Version
from scheduler_plugins.line import LaneKey, Line
from scheduler_plugins.load import DeviceLoad, Flight, Link
from scheduler_plugins.request import Request
from scheduler_plugins.residency import ID_BYTES, Residency
from scheduler_plugins.routing import Route
from scheduler_plugins.statistics import Statistics

A, B = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"


def result(content: bytes, name: str = "net", digest: str = "digest") -> bytes:
    return CacheKey.of(name, digest, content).digest[:ID_BYTES]


class Setting:
    """A line of two devices, on which a pass takes 20 ms."""

    def __init__(self, cache: CachePolicy | None = None) -> None:
        deployment = Deployment(
            "net",
            "cpu",
            (),
            "least-loaded",
            Route("1"),
            cache=cache or CachePolicy(),
        )
        version = Version("net", "1", "digest", policy=BatchPolicy(max_batch_size=8))
        self.link = Link()
        self.line = Line(deployment, version, self.link, 1.0, Statistics())
        self.affinity = Affinity(self.link)
        self.devices = [DeviceLoad(address, "cpu") for address in (A, B)]
        for device in self.devices:
            self.line.devices[device.name] = device
            self.line.latency.seed(device.name, "cpu", [(1, 0.020), (8, 0.020)])

    def push(self, key: str, content: bytes | None) -> Request:
        request = Request(key, "net", None, 0.0, content=content)
        holder = self.affinity.holder(request, self.line)
        request.lane = LaneKey("x", ANYWHERE, holder=holder)
        self.line.queue.push(request)
        return request

    def decide(self, now: float = 0.0) -> Any:
        (lane,) = self.line.queue.oldest(8)
        return self.affinity.decide(self.line, lane, self.devices, now)


def test_a_request_goes_where_its_result_is() -> None:
    setting = Setting()
    setting.affinity.reported("net", B, result(b"x"), b"")
    request = setting.push("k", b"x")
    assert isinstance(request.lane, LaneKey) and request.lane.holder == B
    send = setting.decide()
    assert (send.device.name, send.reason) == (B, "cached")


def test_others_wait_for_a_device_as_ever() -> None:
    setting = Setting()
    setting.affinity.reported("net", B, result(b"x"), b"")
    for key, content in (("a", None), ("b", b"y")):
        request = setting.push(key, content)
        assert isinstance(request.lane, LaneKey) and request.lane.holder is None
    assert setting.decide() is None


def test_results_of_other_weights_or_deployments_are_not_it() -> None:
    setting = Setting()
    others = result(b"x", digest="other"), result(b"x", name="other")
    setting.affinity.reported("net", B, b"".join(others), b"")
    request = setting.push("k", b"x")
    assert isinstance(request.lane, LaneKey) and request.lane.holder is None


def test_a_policy_without_affinity_leaves_requests_alone() -> None:
    setting = Setting(CachePolicy(affinity=False))
    setting.affinity.reported("net", B, result(b"x"), b"")
    request = setting.push("k", b"x")
    assert isinstance(request.lane, LaneKey) and request.lane.holder is None


def test_a_device_that_is_busy_computing_still_looks_up() -> None:
    setting = Setting()
    setting.affinity.reported("net", B, result(b"x"), b"")
    setting.devices[1].send(Flight("b", 8, 0.0, lambda: 10.0))
    setting.push("k", b"x")
    assert setting.decide().device.name == B


def test_a_hot_key_overflows_to_where_it_is_computed() -> None:
    setting = Setting()
    setting.affinity.reported("net", B, result(b"x"), b"")
    setting.push("k", b"x")
    busy = Flight("b", 1000, 0.0, lambda: 0.0, lookups=1000)
    setting.devices[1].look_up(busy)
    assert setting.decide() is None


def test_a_hot_key_is_shared_by_all_who_have_it() -> None:
    setting = Setting()
    for address in (A, B):
        setting.affinity.reported("net", address, result(b"x"), b"")
    lanes = [setting.push(str(n), b"x").lane for n in range(100)]
    holders = [lane.holder for lane in lanes if isinstance(lane, LaneKey)]
    assert holders.count(A) == holders.count(B) == 50


def test_who_waits_is_found_when_a_worker_reports_the_result() -> None:
    setting = Setting()
    requests = [setting.push(str(n), b"x") for n in range(3)]
    other = setting.push("other", b"y")
    setting.line.queue.discard(requests[0])
    found = setting.affinity.reported("net", A, result(b"x"), b"")
    assert found == requests[1:]
    assert setting.affinity.reported("net", B, result(b"x"), b"") == []
    assert setting.affinity.reported("net", B, result(b"y"), b"") == [other]


def test_those_who_wait_no_more_are_let_go() -> None:
    setting = Setting()
    for n in range(20_000):
        request = setting.push(str(n), str(n).encode())
        setting.line.queue.discard(request)
    assert sum(map(len, setting.affinity._awaiting.values())) <= 1024


def test_nobody_goes_to_a_device_that_a_dangerous_batch_has() -> None:
    setting = Setting()
    setting.affinity.reported("net", B, result(b"x"), b"")
    setting.devices[1].send(Flight("b", 1, 0.0, lambda: 0.02, alone=True))
    setting.push("k", b"x")
    assert setting.decide() is None


def test_who_failed_or_is_isolated_goes_by_the_ordinary_way() -> None:
    setting = Setting()
    setting.affinity.reported("net", B, result(b"x"), b"")
    for about in ({"tried": frozenset({A})}, {"group": 1}):
        request = Request("k", "net", None, 0.0, content=b"x", **about)
        assert setting.affinity.holder(request, setting.line) is None


@given(st.floats(0, 10), st.integers(1, 100), st.integers(0, 10_000), st.floats(0, 0.1))
def test_more_ahead_never_makes_a_look_up_faster(
    elsewhere: float, requests: int, ahead: int, each: float
) -> None:
    about: Any = {"requests": requests, "each": each, "outbound": 0.001}
    now = is_faster(0.0, ahead=ahead, elsewhere=elsewhere, **about)
    if now:
        assert is_faster(0.0, ahead=ahead // 2, elsewhere=elsewhere, **about)
        assert is_faster(0.0, ahead=ahead, elsewhere=elsewhere + 1, **about)


names = st.sampled_from(["net", "other"])
addresses = st.sampled_from([A, B])
results = st.sets(st.integers(0, 20).map(lambda n: n.to_bytes(ID_BYTES, "big")))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("report"), names, addresses, results, results),
            st.tuples(st.just("lost"), addresses),
            st.tuples(st.just("forget"), names),
        )
    )
)
def test_residency_knows_what_was_reported(events: list[Any]) -> None:
    residency = Residency()
    model: set[tuple[str, str, bytes]] = set()
    for kind, *about in events:
        if kind == "report":
            name, address, added, dropped = about
            residency.report(name, address, b"".join(added), b"".join(dropped))
            model -= {(name, address, each) for each in dropped}
            model |= {(name, address, each) for each in added}
        elif kind == "lost":
            residency.worker_lost(*about)
            model = {entry for entry in model if entry[1] != about[0]}
        else:
            residency.forget(*about)
            model = {entry for entry in model if entry[0] != about[0]}
        assert len(residency) == len(model)
    for name in ("net", "other"):
        for number in range(21):
            each = number.to_bytes(ID_BYTES, "big")
            expected = {a for n, a, r in model if (n, r) == (name, each)}
            assert set(residency.holders(name, each)) == expected


def test_residency_is_empty_when_all_workers_have_left() -> None:
    residency = Residency()
    for number in range(1000):
        residency.report("net", A, number.to_bytes(ID_BYTES, "big"), b"")
    residency.worker_lost(A)
    assert not residency._holders and not residency._held


def test_the_answer_of_a_look_up_says_nothing_of_the_device() -> None:
    link, device = Link(), DeviceLoad(A, "cpu")
    device.send(Flight("running", 8, 1.0, lambda: 1.0))
    device.send(Flight("found", 8, 1.1, lambda: 1.0))
    free = device.expected_free(1.2, link)
    device.finish("found", 1.2, link, ran=False)
    assert device.expected_free(1.2, link) == free - 1.0
    assert device.free_at == 0.0
