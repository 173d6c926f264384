"""Whose fault it was that a pass failed: found by passes over fewer requests."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from daskinfer.exceptions import OutputMismatch
from daskinfer.failure import contain
from daskinfer.payload import AmbiguousOutput

if TYPE_CHECKING:
    from daskinfer.worker.execution import Memory

Member = TypeVar("Member")


class Isolation(Generic[Member]):
    """Runs passes; one that raises, or does not fit, is run again in halves.

    Parameters
    ----------
    device
        Tells its own errors from those of the inputs; None: there are none.
    does_not_fit
        Told whom the device had no memory for. Whether they wait for some.
    failed
        Told who has failed, and why.

    Attributes
    ----------
    broken
        Why nothing runs on the device any more.

    Examples
    --------
    >>> failed = []
    >>> isolation = Isolation(None, bool, lambda *whom: failed.append(whom))
    >>> isolation.attempt([1, 2, 0, 3], lambda some: [1 / n for n in some])
    >>> failed
    [(0, ZeroDivisionError('division by zero'))]
    """

    def __init__(
        self,
        device: Memory | None,
        does_not_fit: Callable[[Sequence[Member]], bool],
        failed: Callable[[Member, BaseException], object],
    ) -> None:
        self.broken: BaseException | None = None
        self._device = device
        self._does_not_fit = does_not_fit
        self._failed = failed

    def __repr__(self) -> str:
        return f"<Isolation broken: {self.broken!r}>"

    def attempt(
        self,
        members: Sequence[Member],
        run: Callable[[Sequence[Member]], object],
        *,
        is_last: bool = False,
    ) -> None:
        """Run a pass over some requests; what it changes, it changes at its end."""
        if self.broken is not None:
            return
        try:
            contain(run, members)
            return
        except Exception as error:
            failure = error
        # Outside: what the parts raise does not come of what the whole has raised.
        device = self._device
        if device is not None and device.is_fatal(failure):
            # It is kept for as long as the worker is; its frames hold tensors.
            traceback.clear_frames(failure.__traceback__)
            self.broken = failure
            return
        is_memory = device is not None and device.is_out_of_memory(failure)
        if device is not None and is_memory:
            # What the failed pass had computed so far hangs on the frames it ran in.
            traceback.clear_frames(failure.__traceback__)
            device.empty_cache()
            if self._does_not_fit(members):
                return
        if is_memory and len(members) == 1 and not is_last:
            self.attempt(members, run, is_last=True)
            return
        parts = _parts(members, failure)
        if len(parts) > 1:
            for part in parts:
                self.attempt(part, run)
            return
        for member in members:
            self._failed(member, failure)


def _parts(members: Sequence[Member], failure: Exception) -> Sequence[Sequence[Member]]:
    """Whom to try again with whom; all together where that tells nothing."""
    if isinstance(failure, AmbiguousOutput):
        return [[member] for member in members]
    if len(members) == 1 or isinstance(failure, OutputMismatch):
        # A model that gives back too little does so for any input.
        return [members]
    middle = len(members) // 2
    return [members[:middle], members[middle:]]
