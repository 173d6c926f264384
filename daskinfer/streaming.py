"""What a model and its user may say of answers that come piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from daskinfer.fields import size, timeout_of

__all__ = ["Step", "StreamPolicy"]


@dataclass(frozen=True)
class StreamPolicy:
    """How many streams a worker runs for a deployment, and how long a step may take.

    Parameters
    ----------
    max_streams : int
        A worker is given no more streams of the deployment at once. Each keeps what
        the model needs for it; the others wait in the queue.
    idle_timeout : str, float or timedelta, optional
        A stream fails with :class:`~daskinfer.StreamStalled` if the model has had its
        turn for so many seconds (or ``"5s"``) without giving a chunk. The first one
        comes with its batch, for which there is ``batch_timeout``.

    Raises
    ------
    TypeError, ValueError
        A field is wrong; the message names it.

    Notes
    -----
    Immutable, so it can be shared between threads.

    Examples
    --------
    >>> StreamPolicy(idle_timeout="2s").idle_timeout
    2.0
    >>> StreamPolicy(max_streams=0)
    Traceback (most recent call last):
        ...
    ValueError: max_streams must be at least 1, got 0
    """

    max_streams: int = 64
    idle_timeout: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_streams", size("max_streams", self.max_streams))
        seconds = timeout_of("idle_timeout", self.idle_timeout)
        object.__setattr__(self, "idle_timeout", seconds)

    def to_message(self) -> dict[str, Any]:
        """As plain data.

        >>> StreamPolicy(**StreamPolicy().to_message()) == StreamPolicy()
        True
        """
        return asdict(self)


class Step(NamedTuple):
    """One yield of a generator that answers a batch, and which rows end with it.

    A generator that is called with a batch yields outputs with one row for each row of
    its input. Where some need fewer steps than others, it yields a ``Step``: the next
    outputs have rows for those alone that are not finished.

    Parameters
    ----------
    outputs
        Arrays with a row for each live row, in their order, in any containers.
    finished
        Whether it was the last one, for each row.

    Examples
    --------
    >>> import numpy as np
    >>> def count_down(start):
    ...     live = start
    ...     while len(live):
    ...         live = live - 1
    ...         yield Step(live, finished=live == 0)
    ...         live = live[live > 0]
    >>> [step.outputs.tolist() for step in count_down(np.array([2, 1, 3]))]
    [[1, 0, 2], [0, 1], [0]]
    """

    outputs: Any
    finished: Sequence[bool] | Any
