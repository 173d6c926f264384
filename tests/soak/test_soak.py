"""The soak test in a short form; see :mod:`tests.soak.__main__`."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import run


@pytest.mark.process
def test_failing_requests_leave_nothing_behind() -> None:
    report = run(count=5_000)
    print(report)  # shown if it fails
    # A request that stays behind, on any side, is several KiB, and 2,500 of them are 10
    # MiB at least. Dask's own records are full by half of the time.
    for sizes in (report.client, report.scheduler):
        assert sizes[-1] - sizes[4] < 8 * 2**20
    assert report.throughput > 0.5
