"""A status as a person reads it."""

from __future__ import annotations

from typing import Any

from daskinfer.status import (
    DeploymentStatus,
    LatencyPercentiles,
    VersionStatus,
    WorkerStatus,
)


def status(**about: Any) -> DeploymentStatus:
    counts = (
        "requests successes failures cancelled waiting in_flight "
        "batches passes rows padded_rows"
    )
    nothing: dict[str, Any] = dict.fromkeys(counts.split(), 0)
    nothing |= {
        "name": "net",
        "active_version": "1",
        "versions": (VersionStatus("1", "abc", True, 0),),
        "workers": (),
        "mean_batch_size": None,
        "throughput": 0.0,
        "latency": LatencyPercentiles(),
    }
    return DeploymentStatus(**nothing | about)


def test_before_anything_has_happened() -> None:
    assert str(status(problem="the cluster has no worker")).splitlines() == [
        "net, version 1 (0 workers ready)",
        "requests: 0 (0 answered, 0 failed, 0 cancelled, 0 waiting, 0 running)",
        "batches:  0 (0 rows, 0 padded)",
        "speed:    0.0 answers/s; latency p50 -, p95 -, p99 -",
        "no workers",
        "problem: the cluster has no worker",
    ]


def test_columns_are_as_wide_as_their_widest_entry() -> None:
    paused = WorkerStatus("tcp://10.0.0.1:1", "ready", False, "cpu", "cpu/1", 3, 5)
    busy = WorkerStatus(
        "inproc://1", "ready", True, "npu:0", "npu", 12_000, 96_000, 2, 0.1, 0.0123
    )
    assert str(status(workers=(paused, busy))).splitlines()[4:] == [
        "worker            state  device  batches    rows  running batches  latency",
        "tcp://10.0.0.1:1  unfit  cpu           3       5                0        -",
        "inproc://1        ready  npu:0    12,000  96,000                2  12.3 ms",
    ]


def test_workers_that_are_ready_and_get_nothing_are_told_in_the_first_line() -> None:
    version = VersionStatus("1", "abc", True, 3)
    fit = WorkerStatus("a", "ready", True, "cpu")
    late = WorkerStatus("b", "ready", False, "cpu", reason="late", breaker="open")
    tried = WorkerStatus("c", "ready", False, "cpu", reason="new", breaker="half-open")
    lines = str(status(versions=(version,), workers=(fit, late, tried))).splitlines()
    assert lines[0] == "net, version 1 (3 workers ready, 2 of them unfit)"
    assert [" ".join(line.split()) for line in lines[4:]] == [
        "worker state breaker device batches rows running batches latency",
        "a ready closed cpu 0 0 0 -",
        "b unfit open cpu 0 0 0 -",
        "c unfit half-open cpu 0 0 0 -",
        "problem with b: late",
        "about c: new",
    ]


def test_the_representation_still_tells_every_field() -> None:
    text = repr(status(requests=7))
    assert text.startswith("DeploymentStatus(name='net', active_version='1'")
    assert "requests=7" in text and "digest='abc'" in text
