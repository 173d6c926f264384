from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.report import Machine, Ratio, as_json, show


@pytest.mark.parametrize(
    ("measured", "at_most", "ok", "grossly_missed"),
    [
        (8.0, False, True, False),
        (7.9, False, False, False),
        (3.9, False, False, False),
        (1.9, False, False, True),
        (8.0, True, True, False),
        (8.1, True, False, False),
        (16.1, True, False, False),
        (32.1, True, False, True),
    ],
)
def test_a_bar_is_a_least_or_a_most(
    measured: float, at_most: bool, ok: bool, grossly_missed: bool
) -> None:
    ratio = Ratio("ours against theirs", measured, 8.0, at_most=at_most)
    assert (ratio.ok, ratio.grossly_missed) == (ok, grossly_missed)
    assert ratio.bar == ("at most 8" if at_most else "at least 8")


def printed(ratios: list[Ratio], judge: bool) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(console, Machine.here(), "Speed", ratios, judge=judge)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_table_says_what_was_measured_and_where() -> None:
    ratios = [
        Ratio("fast", 9.5, 8.0, detail="95/s of 10/s"),
        Ratio("late", 0.4, 0.35, at_most=True),
    ]
    table = printed(ratios, judge=True)
    for text in ("fast", "9.50", "at least 8", "95/s of 10/s", "held", "MISSED"):
        assert text in table
    assert "torch" in table and "cores" in table


def test_a_smoke_run_does_not_judge() -> None:
    table = printed([Ratio("late", 0.4, 0.35, at_most=True)], judge=False)
    assert "0.40" in table
    assert "MISSED" not in table


def test_json_holds_the_same() -> None:
    ratio = Ratio("late", 0.4, 0.35, at_most=True, detail="4 ms of 10 ms")
    report = json.loads(
        json.dumps(as_json(Machine.here(), {"throughput": [ratio]}, smoke=False))
    )
    assert report["machine"]["cores"] >= 1
    assert report["benchmarks"]["throughput"] == [
        {
            "name": "late",
            "measured": 0.4,
            "required": 0.35,
            "at_most": True,
            "detail": "4 ms of 10 ms",
            "ok": False,
        }
    ]
