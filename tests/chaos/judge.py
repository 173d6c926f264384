"""Whether what became of a request is right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from daskinfer import DeadlineExceeded, WorkerLost
from tests.chaos.models import answer
from tests.chaos.plan import Code


@dataclass(frozen=True)
class Asked:
    """One request: what was sent, and what was done about it.

    Attributes
    ----------
    times
        How often the model is called on it, each time on its own answer.
    """

    key: str
    name: str
    value: int
    code: Code
    has_deadline: bool
    cancelled: bool
    times: int = 1


@dataclass
class Ended:
    """What became of a request.

    Attributes
    ----------
    status
        Of its future.
    callbacks
        How often it was said to have ended.
    seconds
        After how long, at most.
    result
        Its answer.
    error
        Why it has none.
    """

    status: str
    callbacks: int
    seconds: float = 0.0
    result: float | None = None
    error: BaseException | None = None


def wrong(asked: Asked, ended: Ended) -> str | None:
    """Tell what is wrong with a request's end, if anything."""
    if ended.callbacks != 1:
        return f"ended {ended.callbacks} times"
    if asked.cancelled:
        return None if ended.status == "cancelled" else f"is {ended.status}"
    if ended.status == "error":
        return _wrong_error(asked, ended.error)
    if ended.status != "finished":
        return f"is {ended.status}"
    if asked.code in (Code.RAISES, Code.EXITS):
        return f"has the answer {ended.result}, and should have none"
    right = answer(asked.value, asked.times)
    if ended.result != right:
        return f"has the answer {ended.result}, not {right}"
    return None


def _wrong_error(asked: Asked, error: BaseException | None) -> str | None:
    if asked.has_deadline and isinstance(error, DeadlineExceeded):
        return None
    kind = {Code.RAISES: ArithmeticError, Code.EXITS: WorkerLost}.get(asked.code)
    if kind is None:
        return f"failed by {error!r}, and should have an answer"
    return None if type(error) is kind else f"failed by {error!r}, no {kind.__name__}"


@dataclass
class Tally:
    """What became of many requests.

    Attributes
    ----------
    counts
        How many ended how.
    complaints
        What is wrong.
    slowest
        The longest that one of them took in seconds, and which that was.
    """

    counts: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def note(self, asked: Asked, ended: Ended) -> None:
        """Judge one more."""
        how = ended.status
        if how == "error":
            how = type(ended.error).__name__
        self.counts[how] += 1
        self.slowest = max(self.slowest, (ended.seconds, f"{asked}: {how}"))
        complaint = wrong(asked, ended)
        if complaint is not None:
            self.complaints.append(f"{asked}: {complaint}")

    def add(self, message: dict[str, Any]) -> None:
        """Add what another process has noted."""
        self.counts.update(message["counts"])
        self.complaints += message["complaints"]
        self.slowest = max(self.slowest, tuple(message["slowest"]))

    def to_message(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "counts": dict(self.counts),
            "complaints": self.complaints,
            "slowest": self.slowest,
        }
