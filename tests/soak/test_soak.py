"""The soak tests in a short form; see the modules beside it."""

from __future__ import annotations

import pytest

from tests.soak import cycles
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
