"""Models that answer piece by piece: what they give at each step, and to whom.

Here is what a worker expects of whatever runs them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dask.typing import Key

if TYPE_CHECKING:
    from daskinfer.worker.execution import Item


@dataclass(slots=True)
class Emission:
    """What came of one request in one turn on the device.

    ``ended`` with an ``error``, the stream broke after its ``chunks``.
    """

    key: Key
    chunks: list[Any] = field(default_factory=list)
    ended: bool = False
    error: BaseException | None = None


class AtWork(NamedTuple):
    """Whose step is under way, and since when, by :func:`time.perf_counter`."""

    keys: Collection[Key]
    began: float


class Producer(Protocol):
    """Gives the chunks of one or more requests, a few at each turn.

    All but ``live``, ``joins`` and ``at_work`` is called on the device's thread, and
    never at the same time. What is dropped is never emitted again, unless it is added
    again.
    """

    @property
    def live(self) -> Collection[Key]:
        """The requests that have not ended."""

    @property
    def joins(self) -> bool:
        """Whether requests may be added while others run: one serves a model then."""

    @property
    def at_work(self) -> AtWork | None:
        """Who may be told something by the step that is under way; None: none is."""

    def add(self, items: list[Item]) -> None:
        """Take in requests. Their errors are emitted, not raised."""

    def drop(self, keys: Collection[Key]) -> None:
        """Some requests, which may have ended, are not wanted any more."""

    def advance(self, budget: float, paused: Collection[Key] = ()) -> list[Emission]:
        """Run one step, and more as long as ``budget`` seconds have not passed.

        Parameters
        ----------
        budget
            When to begin no further step. With 0 it is one.
        paused
            Requests whose readers have enough for now, or are gone; more may be added
            while steps run. What shares steps with others goes on regardless.

        Returns
        -------
        list of Emission
            One at most for each request. The errors of models are in there.
        """

    def close(self) -> None:
        """Let go of the model; nothing more is emitted."""
