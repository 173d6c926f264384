from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import simulate
from benchmarks.sim.arrivals import Lcg, poisson
from benchmarks.sim.scenarios import POLICIES, load


def test_arrivals_are_exact() -> None:
    random = Lcg(1)
    assert [random.uniform() for _ in range(2)] == [
        0.8397261096476889,
        0.19844004278856286,
    ]
    times = [time for time, _ in poisson(100.0, 20_000)]
    assert times[-1] == pytest.approx(200, rel=0.03)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_all(policy: str) -> None:
    result = load("sizes", policy, 0.5, (1.0, 1.0), count=500)
    assert len(result.latencies) == 500
    again = load("sizes", policy, 0.5, (1.0, 1.0), count=500)
    assert again.latencies == result.latencies


def test_the_comparison_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main(["--requests", "400", "--shapes", "sizes"])
    printed = capsys.readouterr().out
    for policy in simulate.COMPARED:
        assert policy in printed
    assert "load 80%, mean latency" in printed
    assert "Greedy is worse" in printed


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "curves.png"
    simulate.plot(str(file), 100, 1)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"daskinfer\[dev\]"):
        simulate.plot("curves.png", 100, 1)
