"""Reading what a user passed to ``imap``: in a thread of its own, and no further.

An iterable that blocks holds back nobody but itself, and one that never ends is never
read further than there is room.
"""

from __future__ import annotations

import contextvars
import operator
import sys
import threading
from collections import deque
from collections.abc import AsyncIterable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client, Future

    from daskinfer.imap.flow import Flow
    from daskinfer.imap.signals import LoopSignal


def check(iterable: object, allows_async: bool) -> None:
    """Refuse what cannot be meant as many inputs.

    Raises
    ------
    TypeError
        For what is not iterable, for a single text, and for a dask collection other
        than a bag.

    Examples
    --------
    >>> check("a text", allows_async=False)
    Traceback (most recent call last):
        ...
    TypeError: imap takes many inputs, not one str; put it into a list
    """
    kind = type(iterable).__name__
    if isinstance(iterable, str | bytes | bytearray):
        raise TypeError(f"imap takes many inputs, not one {kind}; put it into a list")
    if isinstance(iterable, AsyncIterable):
        if not allows_async:
            raise TypeError(f"a {kind} is read by coroutines only; use aimap")
    elif hasattr(iterable, "__dask_graph__"):
        if not _is_bag(iterable):
            raise TypeError(
                f"imap reads the partitions of a dask bag, but not a dask {kind}; "
                "compute it, or use model.predict for a dask array"
            )
    elif not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
        raise TypeError(f"imap takes an iterable of inputs, not {kind}")


def length(iterable: Any) -> int | None:
    """How many inputs there are, if that is known.

    >>> length([1, 2]), length(iter([1, 2]))
    (2, None)
    """
    if _is_bag(iterable):
        return None
    try:
        return len(iterable)
    except TypeError:
        return None


def length_hint(iterable: Any) -> int | None:
    """About how many inputs there are, if anybody knows.

    >>> length_hint(iter([1, 2])), length_hint(x for x in [1, 2])
    (2, None)
    """
    hint = -1 if _is_bag(iterable) else operator.length_hint(iterable, -1)
    return None if hint < 0 else hint


def inputs_of(client: Client, iterable: Any) -> Iterator[Any]:
    """The inputs in an iterable, or in the partitions of a bag."""
    if _is_bag(iterable):
        return Partitions(client, iterable)
    return iter(iterable)


def _is_bag(iterable: object) -> bool:
    bag = sys.modules.get("dask.bag")
    return bag is not None and isinstance(iterable, bag.Bag)


class Partitions(Iterator[Any]):
    """The elements of a dask bag, one partition after the other.

    The next one is computed on the cluster while one is being read.

    Parameters
    ----------
    client
        Whose cluster computes them.
    bag : dask.bag.Bag
        Is not computed as a whole at any time.
    """

    def __init__(self, client: Client, bag: Any) -> None:
        self._client = client
        self._partitions = iter(bag.to_delayed())
        self._ahead: deque[Future[Any]] = deque()
        self._elements: Iterator[Any] = iter(())
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Partitions computing: {len(self._ahead)}>"

    def __next__(self) -> Any:
        while True:
            for element in self._elements:
                return element
            self._compute()
            if not self._ahead:
                raise StopIteration
            # It stays where it can be cancelled while this thread waits for it.
            self._elements = iter(self._ahead[0].result())
            self._ahead.popleft()
            self._compute()

    def close(self) -> None:
        """Cancel what is being computed, also while another thread waits for it."""
        self._is_closed = True
        loop = self._client.loop
        assert loop is not None, "the client has been started"
        loop.add_callback(self._client._cancel, list(self._ahead))

    def _compute(self) -> None:
        wanted = 0 if self._is_closed else 2 - len(self._ahead)
        for partition in islice(self._partitions, wanted):
            self._ahead.append(self._client.compute(partition))


def read_in_thread(
    flow: Flow, inputs: Iterator[Any], room: threading.Event
) -> threading.Thread:
    """Send inputs as there is room for them, until there are no more."""

    def read() -> None:
        while (count := flow.room()) is not None:
            if not count:
                room.wait()
            for _ in range(count):
                try:
                    value = next(inputs)
                except StopIteration:
                    return flow.end()
                except BaseException as error:
                    # Raised where the results are taken, after those before it.
                    return flow.end(error)
                if not flow.send(value):
                    return None
                del value
        return None

    # Whoever iterates sees what is set where imap was called, such as annotations. It
    # is not waited for: it may be blocked for good.
    thread = threading.Thread(
        target=contextvars.copy_context().run,
        args=(read,),
        name="daskinfer-imap",
        daemon=True,
    )
    thread.start()
    return thread


async def read_in_task(
    flow: Flow, inputs: AsyncIterable[Any], room: LoopSignal
) -> None:
    """As :func:`read_in_thread`, for what is read by a coroutine."""
    try:
        iterator = aiter(inputs)
        while (count := flow.room()) is not None:
            if not count:
                await room.wait()
            for _ in range(count):
                try:
                    value = await anext(iterator)
                except StopAsyncIteration:
                    return flow.end()
                if not flow.send(value):
                    return None
                del value
    except Exception as error:
        flow.end(error)
