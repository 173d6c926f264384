"""Log lines say what they are about, and do not drown the others."""

from __future__ import annotations

import logging
import threading

import pytest
from distributed.utils_test import captured_logger

from daskinfer import logs
from daskinfer.failure import dump_failure, origin, type_of
from daskinfer.logs import BURST, Flood, Log

NAME = "distributed.inference.test"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which only the test moves."""
    now = [0.0]
    monkeypatch.setattr(logs, "monotonic", lambda: now[0])
    return now


def written(text: str) -> list[str]:
    return text.splitlines()


def test_a_line_ends_with_what_it_is_about() -> None:
    with captured_logger(NAME) as log:
        Log("test").info("%s is late", "a", version="2", stimulus_id="s-1")
        Log("test").info("100 % of %s", deployment="it's 50 %")
        Log("test").info("it ended")
    assert written(log.getvalue()) == [
        "a is late [version='2' stimulus_id='s-1']",
        '100 % of %s [deployment="it\'s 50 %"]',
        "it ended",
    ]


def test_whatever_a_message_calls_a_deployment_is_shown_on_one_line() -> None:
    with captured_logger(NAME) as log:
        for name in ("a\nb", ["m"], {}, 3, "x" * 1000, "\u202e"):
            Log("test").info("late", deployment=name, version=name)
    assert len(written(log.getvalue())) == 6
    assert all(len(line) < 300 and line.isascii() for line in written(log.getvalue()))


def test_records_have_it_as_attributes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, NAME):
        Log("test").warning("late", deployment="m", stimulus_id="s-1")
    (record,) = caplog.records
    found = (record.deployment, record.version, record.stimulus_id)  # type: ignore[attr-defined]
    assert found == ("m", None, "s-1")
    # And say who wrote them, not that a helper did.
    assert record.filename == "test_logs.py"
    assert record.funcName == "test_records_have_it_as_attributes"


def test_an_exception_comes_with_its_traceback() -> None:
    with captured_logger(NAME) as log:
        try:
            raise KeyError("k")
        except KeyError:
            Log("test").exception("it failed", deployment="m")
    lines = written(log.getvalue())
    assert lines[0] == "it failed [deployment='m']" and lines[-1] == "KeyError: 'k'"


def test_a_flood_is_cut_and_counted(clock: list[float]) -> None:
    log = Log("test")
    with captured_logger(NAME) as lines:
        for number in range(1000):
            log.warning("%d failed", number, deployment="m")
        told = written(lines.getvalue())
        assert len(told) == BURST
        assert told[-1] == (
            "9 failed; more of these are left out for 10 s [deployment='m']"
        )
        clock[0] = 10.0
        log.info("something else")
    assert written(lines.getvalue())[BURST:] == [
        "990 lines were left out within 10 s that said: %d failed [deployment='m']",
        "something else",
    ]


def test_a_flood_of_one_deployment_leaves_others_their_lines(
    clock: list[float],
) -> None:
    log = Log("test")
    with captured_logger(NAME) as lines:
        for _ in range(1000):
            log.warning("failed", deployment="m")
        log.warning("failed", deployment="other")
        log.error("failed", deployment="m")
        log.warning("late", deployment="m")
    assert written(lines.getvalue())[BURST:] == [
        "failed [deployment='other']",
        "failed [deployment='m']",
        "late [deployment='m']",
    ]


def test_what_must_not_be_missed_is_not(clock: list[float]) -> None:
    with captured_logger(NAME) as lines:
        for number in range(100):
            Log("test").info("lost %d", number, limited=False)
    assert len(written(lines.getvalue())) == 100


def test_lines_that_are_not_wanted_count_for_nothing(clock: list[float]) -> None:
    with captured_logger(NAME, logging.WARNING) as lines:
        for _ in range(100):
            Log("test").info("failed")
        logging.getLogger(NAME).setLevel(logging.INFO)
        Log("test").info("failed")
    assert written(lines.getvalue()) == ["failed"]


def test_who_debugs_gets_all(clock: list[float]) -> None:
    with captured_logger(NAME, logging.DEBUG) as lines:
        for _ in range(100):
            Log("test").debug("failed")
    assert len(written(lines.getvalue())) == 100


def test_a_flood_of_kinds_is_forgotten() -> None:
    flood = Flood(burst=1)
    for number in range(100_000):
        assert flood.admits(number, 0.0)
        list(flood.over(0.0))
    assert len(flood._kinds) <= 1001


def test_many_threads(clock: list[float]) -> None:
    def write() -> None:
        for _ in range(200):
            Log("test").warning("failed")

    with captured_logger(NAME) as lines:
        threads = [threading.Thread(target=write) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock[0] = 11.0
        Log("test").warning("over")
    assert len(written(lines.getvalue())) == BURST + 2
    assert f"{1600 - BURST} lines were left out" in lines.getvalue()


def test_all_of_dasks_defaults_show_it() -> None:
    log = Log("anything")
    assert log.logger.name == "distributed.inference.anything"
    assert log.isEnabledFor(logging.INFO) and not log.isEnabledFor(logging.DEBUG)


class Talkative(Exception):
    def __repr__(self) -> str:
        return f"secret {self.args}"


def test_where_an_exception_was_raised_is_told_and_not_what_it_says() -> None:
    def fail(error: Exception) -> None:
        raise error

    for error in (ValueError("secret"), Talkative("secret")):
        try:
            fail(error)
        except Exception as caught:
            told = origin(caught)
        assert told.startswith(f"{type(error).__name__} in fail (")
        assert "secret" not in told and "test_logs.py:" in told
        assert "secret" not in type_of(dump_failure(error))
