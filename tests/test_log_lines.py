"""Every line that operators see says which deployment and which event it is about."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for package in ("daskinfer", "scheduler_plugins")
    for path in sorted((ROOT / package).rglob("*.py"))
    # What all lines go through.
    if path != ROOT / "daskinfer" / "logs.py"
]
SEEN = {"info", "warning", "error", "exception", "critical", "log"}
LOGGERS = {"log", "logger"}

#: Lines that lack one of the two, by module and by how they begin, and why.
NO_DEPLOYMENT = {
    ("daskinfer/artifact/store.py", "Removed %s, which is damaged"): (
        "several deployments may have these weights"
    ),
    ("daskinfer/cache/build.py", "There is no cache on disk"): "of the whole worker",
    ("daskinfer/cache/disk.py", "The cache cannot use"): "of the whole worker",
    ("daskinfer/cache/disk.py", "Removed the cached file"): "a cache is of anything",
    ("daskinfer/cache/ladder.py", "A cached value on"): "a cache is of anything",
    ("daskinfer/cache/ladder.py", "A cached value cannot be"): "a cache is of anything",
    ("daskinfer/cache/tiered.py", "A value of type"): "a cache is of anything",
    ("daskinfer/cli/worker.py", "Starting"): "of the host",
    ("daskinfer/cli/worker.py", "All"): "of the host",
    ("daskinfer/device/host.py", "Could not look for devices"): "of the host",
    ("daskinfer/exposition.py", "Not all figures"): "of a process",
    ("daskinfer/future.py", "Could not unpack results"): "of several deployments",
    ("daskinfer/imap/flow.py", "Could not look at"): (
        "names the deployment; clients that look have no stimulus"
    ),
    ("daskinfer/worker/caching.py", "Caches could not be tended"): "of all caches",
    ("daskinfer/worker/restarting.py", "Results of %s"): "of all on a worker",
    ("daskinfer/worker/results.py", "Could not pack"): "of several deployments",
    ("daskinfer/worker/room.py", "The memory of the"): "of a device",
    ("daskinfer/worker/runtime.py", "Replacing the process"): "of a worker",
    ("daskinfer/worker/telemetry.py", "%r does not tell"): "of a device",
    ("daskinfer/worker/weights.py", "%s cannot keep weights"): "of a worker",
    ("scheduler_plugins/configured.py", "%s %s: nothing of it"): "of all entries",
    ("scheduler_plugins/dashboard/__init__.py", "The dashboard"): "of the page",
    ("scheduler_plugins/dispatcher.py", "%d requests could not"): (
        "of several deployments"
    ),
    ("scheduler_plugins/distribution.py", "%s got no chunk"): (
        "several deployments may have these weights"
    ),
    ("scheduler_plugins/distribution.py", "%s says nothing of the weights"): (
        "several deployments may have these weights"
    ),
    ("scheduler_plugins/replacing.py", "%s is out of service"): "of a worker",
    ("scheduler_plugins/supervision.py", "%s answers again"): "of a worker",
}


def calls(source: str) -> Iterator[ast.Call]:
    """All calls that write a line at INFO or above."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in SEEN
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in LOGGERS
        ):
            yield node


def message(call: ast.Call) -> str:
    """What a line says, as far as the source shows it."""
    assert isinstance(call.func, ast.Attribute)
    text = call.args[1 if call.func.attr == "log" else 0]
    return str(text.value) if isinstance(text, ast.Constant) else ast.unparse(text)


def is_told(call: ast.Call) -> bool:
    """Whether it says deployment and stimulus id, one by one or by what has both."""
    given = {keyword.arg for keyword in call.keywords}
    at_once = [ast.unparse(k.value) for k in call.keywords if k.arg is None]
    return given >= {"deployment", "stimulus_id"} or any(
        "about" in unpacked for unpacked in at_once
    )


def excuses(path: str, said: str) -> list[tuple[str, str]]:
    return [key for key in NO_DEPLOYMENT if key[0] == path and said.startswith(key[1])]


def test_lines_say_what_they_are_about() -> None:
    silent, used, seen = [], set(), 0
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        for call in calls(path.read_text("utf-8")):
            seen += 1
            if is_told(call):
                continue
            found = excuses(name, message(call))
            used.update(found)
            if not found:
                silent.append(f"{name}:{call.lineno} {message(call)!r}")
    assert silent == []
    # Nothing is excused that is not there any more.
    assert used == set(NO_DEPLOYMENT)
    assert seen > 50


def test_all_loggers_are_of_the_kind_that_says_it() -> None:
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign):
                continue
            targets = {t.id for t in node.targets if isinstance(t, ast.Name)}
            if targets & LOGGERS:
                assert ast.unparse(node.value).startswith("Log("), path


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("logger.info('late', deployment=a)", False),
        ("logger.info('late', stimulus_id=b)", False),
        ("logger.log(10, 'late')", False),
        ("logger.error('late', deployment=a, stimulus_id=b)", True),
        ("logger.error('late', **_about(batch))", True),
        ("logger.error('late', **others)", False),
    ],
)
def test_what_is_told_is_found_in_the_source(source: str, told: bool) -> None:
    (call,) = calls(source)
    assert message(call) == "late" and is_told(call) is told
    assert list(calls("logger.debug('late')")) == []
