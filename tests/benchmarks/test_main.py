from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as main_module
from benchmarks.report import Ratio

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Ratio]:
    """What every benchmark measures."""
    ratios: list[Ratio] = []
    module = SimpleNamespace(TITLE="Speed", run=lambda smoke: ratios)
    monkeypatch.setattr(main_module, "importlib", SimpleNamespace())
    monkeypatch.setattr(
        main_module.importlib, "import_module", lambda name: module, raising=False
    )
    return ratios


def test_a_missed_bar_is_a_failure(measured: list[Ratio]) -> None:
    measured.append(Ratio("held", 9.0, 8.0))
    assert main_module.main(["throughput"]) == 0
    measured.append(Ratio("missed", 7.0, 8.0))
    assert main_module.main(["throughput"]) == 1


def test_a_smoke_run_fails_for_a_gross_miss_only(
    measured: list[Ratio], capsys: pytest.CaptureFixture[str]
) -> None:
    measured.append(Ratio("missed", 7.0, 8.0))
    assert main_module.main(["throughput", "--smoke"]) == 0
    assert "missed:" not in capsys.readouterr().out
    measured.append(Ratio("missed by far", 1.0, 8.0))
    assert main_module.main(["throughput", "--smoke"]) == 1
    assert "missed: missed by far: 1.00, at least 8" in capsys.readouterr().out


def test_all_run_by_default(measured: list[Ratio], tmp_path: Path) -> None:
    measured.append(Ratio("held", 9.0, 8.0))
    file = tmp_path / "report.json"
    assert main_module.main(["--json", str(file)]) == 0
    assert tuple(json.loads(file.read_text())["benchmarks"]) == main_module.NAMES


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_module.main(["speed"])
    assert "no benchmark 'speed'; there are throughput" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_every_benchmark_runs(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--json", str(file)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        try:
            output, _ = run.communicate(timeout=880)
        finally:
            # Asked to end, it ends its clusters.
            run.terminate()
    # Machines are noisy: only a gross miss is a failure.
    assert run.returncode == 0, output
    found = json.loads(file.read_text())["benchmarks"]
    assert tuple(found) == main_module.NAMES and all(found.values())
    assert all(ratio["measured"] > 0 for ratios in found.values() for ratio in ratios)
