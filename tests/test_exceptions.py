"""The errors of the engine: carried whole, and documented."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest
from distributed.scheduler import KilledWorker

import daskinfer
from daskinfer import exceptions
from daskinfer.exceptions import InferenceError, RequestFailed, WorkerLost
from daskinfer.failure import dump_failure, load_failure, note_origin

KINDS = [
    kind
    for _, kind in inspect.getmembers(exceptions, inspect.isclass)
    if issubclass(kind, RequestFailed) and kind is not RequestFailed
]


def documented() -> dict[str, str]:
    """Type and "retryable" of each row of the table with four columns."""
    page = Path(__file__).parents[1] / "docs" / "failures.md"
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[2] for row in rows if len(row) == 4}


def test_the_table_tells_all_types_and_which_are_retryable():
    told = {kind.__name__: "yes" if kind.retryable else "no" for kind in KINDS}
    assert documented() == told


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for _, kind in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(kind, InferenceError) and not issubclass(kind, RequestFailed)
    ],
)
def test_errors_of_deployments_are_carried(kind: type[InferenceError]):
    again = _shipped(kind("what happened"))
    assert (type(again), str(again)) == (kind, "what happened")


def _shipped(error: Exception) -> BaseException:
    """An exception as it is after a way through the network."""
    failure = dump_failure(error)
    return load_failure({k: getattr(v, "data", v) for k, v in failure.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_carried_whole(kind: type[RequestFailed]):
    about = {
        "key": ("k", 1),
        "name": "m",
        "version": "2",
        "worker": "tcp://a:1",
        "attempts": 3,
    }
    error = kind("what happened", **about)
    error.__notes__ = ["a note"]
    shipped = _shipped(error)
    for again in (pickle.loads(pickle.dumps(error)), shipped):
        assert type(again) is kind
        assert str(again) == "what happened"
        assert {name: getattr(again, name) for name in about} == about
        assert again.__notes__ == ["a note"]
    assert isinstance(error, InferenceError)
    assert getattr(daskinfer, kind.__name__) is kind


def test_a_lost_worker_is_caught_as_dasks_own_error():
    error = WorkerLost("died", key="k", worker="tcp://a:1", attempts=3)
    with pytest.raises(KilledWorker, match="died"):
        raise error
    assert (error.task, error.allowed_failures) == ("k", 2)
    assert error.last_worker.address == "tcp://a:1"


def test_the_note_on_an_exception_is_there_once():
    error = ValueError("the same object, raised for ever")
    error.__notes__ = ["the model's own"]
    for worker in ("tcp://a:1", "tcp://b:1"):
        note_origin(error, "m", "1", worker, "request 'k'")
    assert error.__notes__ == [
        "the model's own",
        "Raised in deployment 'm', version '1', on tcp://b:1; request 'k'",
    ]


class Stubborn(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("I stay as I am")


def test_an_exception_that_refuses_a_note_travels_without():
    error = Stubborn("no")
    note_origin(error, "m", "1", "tcp://a:1", "request 'k'")
    assert not hasattr(error, "__notes__")
