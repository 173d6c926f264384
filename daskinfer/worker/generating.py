"""Generators, which answer the requests of a batch in turn.

Knows neither workers nor the event loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING

from dask.typing import Key

from daskinfer.wording import counted
from daskinfer.worker.flow import Flow
from daskinfer.worker.producing import AtWork, Emission

if TYPE_CHECKING:
    from daskinfer.worker.execution import Item


class GeneratorProducer:
    """The requests of one batch, on the iterators that a model has returned for them.

    Parameters
    ----------
    flows
        They take turns.

    Examples
    --------
    >>> from daskinfer.worker.execution import Item
    >>> flows = [Flow(iter(t), [Item(t, lambda: ((), {}))]) for t in ("ab", "c")]
    >>> producer = GeneratorProducer(flows)
    >>> [(e.key, e.chunks, e.ended) for e in producer.advance(0.0)]
    [('ab', ['a'], False)]
    >>> [(e.key, e.chunks, e.ended) for e in producer.advance(1.0)]
    [('c', ['c'], True), ('ab', ['b'], True)]
    """

    joins = False

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows = deque(flows)
        self._lock = threading.Lock()
        self._given: dict[Key, Emission] = {}
        self.at_work: AtWork | None = None

    def __repr__(self) -> str:
        return f"<GeneratorProducer of {counted(len(self.live), 'request')}>"

    @property
    def live(self) -> list[Key]:
        """The requests that have not ended."""
        return list(chain.from_iterable(flow.wanted for flow in self._flows))

    def begun(self) -> list[Emission]:
        """What was taken already, from whatever thread."""
        found = [e for flow in self._flows for e in flow.begun()]
        self._flows = deque(flow for flow in self._flows if flow.wanted)
        return found

    def add(self, items: list[Item]) -> None:
        """Refused: a generator that runs takes no more inputs."""
        raise TypeError("a generator cannot be joined while it runs")

    def drop(self, keys: Collection[Key]) -> None:
        """Close the generators of which nothing is wanted any more."""
        for flow in self._flows:
            flow.drop(keys)
        self._flows = deque(flow for flow in self._flows if flow.wanted)

    def advance(self, budget: float, paused: Collection[Key] = ()) -> list[Emission]:
        """Take outputs of the iterators in turn; see :meth:`Producer.advance`."""
        stop = perf_counter() + budget
        ready = deque(self._flows)
        while ready:
            flow = ready.popleft()
            if set(flow.wanted).issubset(paused):
                continue
            self.at_work = AtWork(flow.wanted, perf_counter())
            self._give(_stepped(flow))
            self.at_work = None
            # Behind the others, also at the next turn.
            self._flows.remove(flow)
            if flow.wanted:
                self._flows.append(flow)
                ready.append(flow)
            if perf_counter() >= stop:
                break
        return self.collect()

    def collect(self) -> list[Emission]:
        """Take what was given so far, from whatever thread.

        A step may take long, and those before it in the same turn were short.
        """
        with self._lock:
            given, self._given = self._given, {}
        return list(given.values())

    def _give(self, emissions: list[Emission]) -> None:
        with self._lock:
            for emission in emissions:
                known = self._given.setdefault(emission.key, emission)
                if known is not emission:
                    known.chunks += emission.chunks
                    known.ended, known.error = emission.ended, emission.error

    def close(self) -> None:
        """Close all generators."""
        self.drop(self.live)


def _stepped(flow: Flow) -> list[Emission]:
    wanted = flow.wanted
    try:
        return flow.step()
    except Exception as error:
        failure = error
    flow.close()
    return [Emission(key, ended=True, error=failure) for key in wanted]
