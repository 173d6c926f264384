from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.statistics import RECENT, WINDOW, Statistics


def test_nothing_is_known_of_nothing():
    counts = Statistics()
    latency = counts.latency()
    assert (latency.p50, latency.p95, latency.p99, latency.mean) == (None,) * 4
    assert counts.throughput(now=100.0) == 0


def test_percentiles_are_those_of_the_sorted_latencies():
    latencies = [i / 100 for i in range(101)]
    random.Random(0).shuffle(latencies)
    counts = Statistics()
    for latency in latencies:
        counts.succeeded([latency], now=0.0)
    found = counts.latency()
    assert (found.p50, found.p95, found.p99) == (0.50, 0.95, 0.99)
    assert found.mean == pytest.approx(0.5)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=200))
def test_percentiles_are_ordered_and_were_seen(latencies):
    counts = Statistics()
    counts.succeeded(latencies, now=0.0)
    found = counts.latency()
    assert min(latencies) <= found.p50 <= found.p95 <= found.p99 <= max(latencies)
    assert {found.p50, found.p95, found.p99} <= set(latencies)


def test_old_latencies_are_forgotten():
    counts = Statistics()
    counts.succeeded([100.0] * RECENT, now=0.0)
    counts.succeeded([0.001] * RECENT, now=1.0)
    assert counts.latency().p99 == 0.001
    assert counts.successes == 2 * RECENT


def test_throughput_looks_at_the_last_seconds_only():
    counts = Statistics()
    counts.succeeded([0.0] * 30, now=0.0)
    assert counts.throughput(now=WINDOW / 2) == 30 / (WINDOW / 2)
    counts.succeeded([0.1] * 20, now=0.9 * WINDOW)
    assert counts.throughput(now=WINDOW) == 50 / WINDOW
    assert counts.throughput(now=1.5 * WINDOW) == 20 / WINDOW
    assert counts.throughput(now=3 * WINDOW) == 0


def test_padding_is_counted_apart_from_rows():
    counts = Statistics()
    counts.ran("tcp://a:1", [(3, 4, 0.5), (16, 16, 1.5)])
    counts.ran("tcp://b:1", [(1, 1, 0.25)])
    assert (counts.batches, counts.passes) == (2, 3)
    assert (counts.rows, counts.padded_rows) == (20, 1)
    worker = counts.workers["tcp://a:1"]
    assert (worker.batches, worker.passes, worker.rows) == (1, 2, 19)
    assert worker.seconds == 2.0


def test_it_tells_its_counts():
    counts = Statistics()
    counts.arrived(3)
    counts.failures += 1
    assert (
        repr(counts) == "<Statistics requests: 3 successes: 0 failures: 1 cancelled: 0>"
    )
