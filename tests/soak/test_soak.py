"""The soak tests in a short form; see the modules beside it."""

from __future__ import annotations

import pytest

from tests.soak import cycles, streams
from tests.soak.__main__ import run


@pytest.mark.slow
@pytest.mark.process
def test_failing_requests_leave_nothing_behind() -> None:
    report = run(count=5_000)
    print(report)  # shown if it fails
    # A request that stays behind, on any side, is several KiB, and 2,500 of them are 10
    # MiB at least. Dask's own records are full by half of the time.
    for sizes in report.memory.values():
        assert sizes[-1] - sizes[4] < 8 * 2**20
    assert report.throughput > 0.5


@pytest.mark.slow
@pytest.mark.process
def test_deployments_leave_nothing_behind() -> None:
    report = cycles.run(count=60)
    print(report)  # shown if it fails
    # Three versions of 0.5 MB each time: a leak would be 144 MB on the two workers
    # from the first fifth to the end, and 72 MB in the scheduler.
    for sizes in report.memory.values():
        assert sizes[-1] - sizes[1] < 16 * 2**20
    assert not any(report.left.values())
    assert report.throughput > 0.5


@pytest.mark.slow
@pytest.mark.process
def test_streams_that_are_left_leave_nothing_behind() -> None:
    report = streams.leaving(count=1_500)
    print(report)  # shown if it fails
    # A stream that stays behind, on any side, is several KiB, and 1,200 of them are 5
    # MiB at least.
    for sizes in report.memory.values():
        assert sizes[-1] - sizes[1] < 8 * 2**20
    assert not any(report.left.values())
    assert report.throughput > 0.5


@pytest.mark.slow
@pytest.mark.process
def test_a_reader_that_sleeps_grows_nobodys_memory() -> None:
    report = streams.sleeping(chunks=20_000)
    print(report)  # shown if it fails
    # The model would give it as much as the other reader has: 260 MB from the second
    # tenth to the end.
    for sizes in report.memory.values():
        assert sizes[-1] - sizes[1] < 32 * 2**20
    assert not any(report.left.values())
    assert report.throughput > 0.5
