"""One iterator that a model has returned, and the requests that it answers.

Knows neither workers nor the event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer import payload
from daskinfer.exceptions import OutputMismatch
from daskinfer.failure import contain, origin
from daskinfer.logs import Log
from daskinfer.streaming import Step
from daskinfer.wording import counted
from daskinfer.worker.producing import Emission

if TYPE_CHECKING:
    from daskinfer.worker.execution import Item

logger = Log("flow")

#: Instead of an output: there are no more.
END: Any = object()


class Flow:
    """One iterator of a model's, whose every output is divided among its requests.

    Parameters
    ----------
    outputs
        What the model has returned.
    items
        Whose inputs it was called with.
    sizes
        Rows of each; None where the one there is takes every output whole.
    batch_dim
        The axis along which they were joined; None: they were stacked.
    padding
        Rows that were added to them.
    about
        What log lines say that they are about, as :class:`~daskinfer.logs.Log` has it.

    Attributes
    ----------
    asked, items
        All requests by key, and those that have not ended.

    Examples
    --------
    >>> import numpy as np
    >>> from daskinfer.worker.execution import Item
    >>> outputs = iter([np.array([1, 2]), Step(np.array([3, 4]), [True, False])])
    >>> items = [Item(key, lambda: ((), {})) for key in "ab"]
    >>> flow = Flow(outputs, items, [1, 1])
    >>> [(e.key, e.chunks, e.ended) for e in flow.step()]
    [('a', [array([1])], False), ('b', [array([2])], False)]
    >>> [(e.key, e.chunks, e.ended) for e in flow.step()]
    [('a', [array([3])], True), ('b', [array([4])], False)]
    >>> [(e.key, e.chunks, e.ended) for e in flow.step()]
    [('b', [], True)]
    """

    def __init__(
        self,
        outputs: Any,
        items: Sequence[Item],
        sizes: Sequence[int] | None = None,
        batch_dim: int | None = 0,
        padding: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.about = dict(about or {})
        self.asked = {item.key: item for item in items}
        self.items = dict(self.asked)
        self._outputs = outputs
        self._batch_dim = batch_dim
        self._sizes = (
            None if sizes is None else dict(zip(self.items, sizes, strict=True))
        )
        self._padding = padding
        self._unwanted: set[Key] = set()
        self._ahead: list[Emission] | None = None

    def __repr__(self) -> str:
        return f"<Flow to {counted(len(self.wanted), 'request')}>"

    @property
    def wanted(self) -> list[Key]:
        """Requests that are still to get something."""
        return [key for key in self.items if key not in self._unwanted]

    @property
    def rows(self) -> int:
        """Rows that are live, without the padding."""
        return 1 if self._sizes is None else sum(self._sizes.values())

    @property
    def outputs(self) -> Any:
        """What the model has returned."""
        return self._outputs

    def begin(self) -> Flow:
        """Take the first output now, to be given at the first step.

        Raises
        ------
        Exception
            As :meth:`step`. All can be tried again then.
        """
        try:
            self._ahead = self._take()
        except Exception:
            self.close()
            raise
        return self

    def drop(self, keys: Collection[Key]) -> None:
        """Give nothing more to some requests."""
        # The model does not know, and goes on to give rows for them.
        self._unwanted.update(self.items.keys() & set(keys))
        if not self.wanted:
            self.close()

    def step(self) -> list[Emission]:
        """Take the next output.

        Raises
        ------
        Exception
            What the model raises, or an output that cannot be divided.
        """
        return self._take() if self._ahead is None else self.begun()

    def begun(self) -> list[Emission]:
        """What was taken already, and is not given yet."""
        ahead, self._ahead = self._ahead, None
        return [e for e in ahead or () if e.key not in self._unwanted]

    def _take(self) -> list[Emission]:
        output = contain(next, self._outputs, END)
        return self.ended() if output is END else self.give(output)

    def ended(self) -> list[Emission]:
        """There are no more outputs."""
        wanted = self.wanted
        self.items.clear()
        return [Emission(key, ended=True) for key in wanted]

    def give(self, output: Any) -> list[Emission]:
        """Divide an output that was taken.

        Raises
        ------
        OutputMismatch
            It cannot be divided.
        """
        wanted = self.wanted
        finished = None
        if isinstance(output, Step):
            output, finished = output.outputs, _flags(output.finished)
        pieces = dict(zip(self.items, self._divide(output), strict=True))
        emissions = {key: Emission(key, [pieces[key]]) for key in wanted}
        if finished is not None:
            for key in self._finish(finished):
                if key in emissions:
                    emissions[key].ended = True
            if not self.wanted:
                self.close()
        return list(emissions.values())

    def close(self) -> None:
        """Have the model stop where it is, as leaving a loop does."""
        self.items.clear()
        outputs, self._outputs = self._outputs, iter(())
        try:
            # Iterators other than generators have none.
            contain(getattr(outputs, "close", int))
        except Exception as error:
            told = "A model raised %s as it was stopped"
            logger.info(told, origin(error), **self.about)

    def _divide(self, output: Any) -> Sequence[Any]:
        if self._sizes is None:
            return [payload.copy_arrays(output)]
        sizes = list(self._sizes.values())
        pad_to = sum(sizes) + self._padding if self._padding else None
        return payload.split(output, sizes, self._batch_dim, pad_to)

    def _finish(self, finished: list[bool]) -> list[Key]:
        """Take rows out; return the requests that have none any more."""
        sizes = {next(iter(self.items)): 1} if self._sizes is None else self._sizes
        rows = sum(sizes.values()) + self._padding
        if self._sizes is None:
            finished = [bool(finished) and all(finished)]
        if len(finished) != rows:
            raise OutputMismatch(
                f"Step.finished has {counted(len(finished), 'entry', 'entries')} where "
                f"{counted(rows, 'row is', 'rows are')} live; give one for each row of "
                "the outputs"
            )
        flags = iter(finished)
        ended = []
        for key, size in list(sizes.items()):
            left = size - sum(next(flags) for _ in range(size))
            sizes[key] = left
            # What has no rows never ends so, but with the generator.
            if size and not left:
                del sizes[key], self.items[key]
                ended.append(key)
        self._padding -= sum(flags)
        return ended


def chunks_of(flow: Flow) -> Iterator[Any]:
    """All that the one request of a flow is given.

    >>> from daskinfer.worker.execution import Item
    >>> list(chunks_of(Flow(iter("ab"), [Item("k", lambda: ((), {}))])))
    ['a', 'b']
    """
    while flow.wanted:
        for emission in flow.step():
            yield from emission.chunks


def _flags(finished: Any) -> list[bool]:
    if hasattr(finished, "tolist"):
        finished = finished.tolist()
    return [bool(flag) for flag in finished]
