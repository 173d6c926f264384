"""The demo and the examples run as a user would start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.process

#: What Dask's workers log if their cluster closes in the middle of a heartbeat.
HEARTBEAT = re.compile(
    r"^.* Failed to communicate with scheduler during heartbeat\.\n"
    r"(?:.*\n)*?distributed\.comm\.core\.CommClosedError: .*$",
    re.MULTILINE,
)


def run(module: str, *arguments: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    errors = HEARTBEAT.sub("", completed.stderr)
    assert "Traceback" not in errors, completed.stderr
    return completed.stdout


def percentages(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([0-9.]+)%", text)]


def test_demo() -> None:
    output = run("daskinfer.demo", "--workers=2", "--rounds=1")
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/status", output)
    rows = [line for line in output.splitlines() if re.search(r"\d+\.\d ×", line)]
    assert len(rows) == 3, output
    assert all(percentages(row)[0] >= 97 for row in rows), output
    assert "1,797 requests of one image" in output
    # A bar for each way, in the warm-up and in the round; none stops short.
    bars = re.findall(r"^(.+?)  +━+ (\d+)/(\d+) \d:\d\d:\d\d$", output, re.MULTILINE)
    ways = [row.split("│")[1].strip() for row in rows]
    names = [*(f"{way} (warm-up)" for way in ways), *ways]
    assert bars == [(name, "1797", "1797") for name in names], output
    assert "mean batch size" in output
    shares = [percentages(row)[-1] for row in output.splitlines() if "tcp://" in row]
    assert len(shares) == 2, output
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_analysis() -> None:
    output = run("examples.analysis", "--workers=2", "--images=300", "--levels=3")
    right = {line.split(":")[0]: percentages(line)[0] for line in output.splitlines()}
    assert sorted(right) == ["noise 0.00", "noise 0.50", "noise 1.00"]
    assert right["noise 0.00"] >= 97
    assert right["noise 0.00"] >= right["noise 0.50"] > right["noise 1.00"]


def test_dask_array() -> None:
    output = run("examples.dask_array", "--workers=2", "--repeat=1", "--chunk=500")
    assert "1,797 images in 4 blocks" in output
    predicted, mapped = percentages(output)
    assert predicted == mapped >= 97


def test_text_embedding() -> None:
    output = run("examples.text_embedding", "--workers=2", "--sentences=24")
    lines = output.splitlines()
    assert lines[0] == "Where does my job get run?"
    assert lines[1].endswith("The scheduler decides which worker runs a task.")
    assert lines[-1].startswith("25 sentences in ")


def test_characters() -> None:
    output = run(
        "examples.characters", "A class", "--workers=1", "--length=120", "--others=8"
    )
    text, _, rest = output.partition("\n--\n")
    assert text.startswith("A class") and len(text) == len("A class") + 120
    # English, more or less: it has read some.
    words = re.findall("[a-z]+", text.lower())
    assert {"the", "a", "is", "of", "to", "in", "an", "and"} & set(words[2:])
    lines = rest.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"\d+ letters for 9 readers", lines[-1])


def test_decoder() -> None:
    pytest.importorskip("transformers")
    output = run("examples.decoder", "--workers=1", "--requests=12")
    told = r"12 requests, (\d+) tokens, [\d,]+/s\nfirst:((?: \d+)+)\n"
    found = re.match(told, output)
    assert found is not None, output
    assert int(found[1]) >= 12
    assert 1 <= len(found[2].split()) <= 10
