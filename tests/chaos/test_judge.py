"""That the judge finds what is wrong; a judge who finds nothing proves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daskinfer import DeadlineExceeded, NoReadyWorker, WorkerLost
from tests.chaos.judge import Asked, Ended, Tally, wrong
from tests.chaos.plan import Code

GOOD = Asked("k", "m", 7, Code.GOOD, has_deadline=False, cancelled=False)
RAISES = replace(GOOD, code=Code.RAISES)
EXITS = replace(GOOD, code=Code.EXITS)
LATE = replace(GOOD, has_deadline=True)
CANCELLED = replace(GOOD, cancelled=True)


def answered(result: float, callbacks: int = 1) -> Ended:
    return Ended("finished", callbacks, result=result)


def failed(error: BaseException) -> Ended:
    return Ended("error", 1, error=error)


@pytest.mark.parametrize(
    ("asked", "ended"),
    [
        (GOOD, answered(15.0)),
        (replace(GOOD, code=Code.HOLDS), answered(15.0)),
        (replace(GOOD, times=2), answered(31.0)),
        (RAISES, failed(ArithmeticError())),
        (EXITS, failed(WorkerLost("gone"))),
        (LATE, answered(15.0)),
        (LATE, failed(DeadlineExceeded("late"))),
        (replace(EXITS, has_deadline=True), failed(NoReadyWorker("late"))),
        (CANCELLED, Ended("cancelled", 1)),
    ],
)
def test_right(asked, ended):
    assert wrong(asked, ended) is None


@pytest.mark.parametrize(
    ("asked", "ended", "told"),
    [
        (GOOD, answered(14.0), "has the answer 14.0, not 15.0"),
        (replace(GOOD, times=2), answered(15.0), "not 31.0"),
        (GOOD, answered(15.0, callbacks=2), "ended 2 times"),
        (GOOD, answered(15.0, callbacks=0), "ended 0 times"),
        (GOOD, Ended("pending", 1), "is pending"),
        (GOOD, Ended("cancelled", 1), "is cancelled"),
        (GOOD, failed(WorkerLost("gone")), "should have an answer"),
        (GOOD, failed(DeadlineExceeded("late")), "should have an answer"),
        (LATE, failed(WorkerLost("gone")), "should have an answer"),
        (RAISES, answered(15.0), "should have none"),
        (RAISES, failed(WorkerLost("gone")), "no ArithmeticError"),
        (EXITS, failed(ArithmeticError()), "no WorkerLost"),
        (CANCELLED, answered(15.0), "is finished"),
    ],
)
def test_wrong(asked, ended, told):
    assert told in (wrong(asked, ended) or "")
    tally = Tally()
    tally.note(asked, ended)
    assert len(tally.complaints) == 1 and told in tally.complaints[0]


def test_tallies_of_other_processes_are_added():
    one, other = Tally(), Tally()
    one.note(GOOD, replace(answered(15.0), seconds=2.0))
    other.note(GOOD, answered(15.0))
    other.note(RAISES, failed(ArithmeticError()))
    other.note(GOOD, Ended("pending", 1))
    one.add(other.to_message())
    assert one.counts == {"finished": 2, "ArithmeticError": 1, "pending": 1}
    assert one.complaints == other.complaints
    assert one.slowest[0] == 2.0
