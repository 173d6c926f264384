"""``imap`` and ``aimap``, which handles have with options and without."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import TYPE_CHECKING, Any

from daskinfer.fields import size

if TYPE_CHECKING:
    from daskinfer.handle import Model
    from daskinfer.imap.results import AsyncImap, Imap, Job
    from daskinfer.options import CallOptions


class Iterated:
    """What handles can do with inputs that come one after the other."""

    __slots__ = ()

    def imap(
        self,
        iterable: Iterable[Any],
        *,
        ordered: bool = True,
        max_in_flight: int | str = "auto",
        on_error: str = "raise",
        **kwargs: Any,
    ) -> Imap:
        """Iterate over the results of inputs that may never end.

        Inputs are read as results are taken, in a thread of its own: an iterable that
        blocks holds back no results, and one without end takes bounded memory.

        Parameters
        ----------
        iterable : iterable or dask.bag.Bag
            The inputs, one request each; tuples are inputs too. A bag is computed
            partition by partition.
        ordered
            Give results in the order of the inputs; False gives them as they come.
        max_in_flight : int or "auto"
            How many requests there may be whose results have not been taken. By
            default as many as keep the devices busy, and no more: that follows the
            batch sizes that the deployment learns.
        on_error
            ``"raise"`` what became of an input in its turn, which ends it all; or
            ``"return"`` the exception in the place of the result.
        **kwargs
            Keywords of the model, the same for every request.

        Returns
        -------
        Imap
            An iterator. Closing it, leaving its ``with`` block, or letting go of it
            (as a loop that is left does) cancels what is on its way. ``len()`` is the
            number of results to come, if the inputs have a length.

        Raises
        ------
        TypeError, ValueError
            At once, for arguments that cannot be meant.
        RuntimeError
            At once, on the event loop of an asynchronous client: use :meth:`aimap`.
        Exception
            While iterating: what reading the inputs raised, after the results before
            it; with ``on_error="raise"``, what became of an input;
            :class:`~daskinfer.UnknownDeployment` and
            :class:`~daskinfer.SchedulerLost` in any case.

        Notes
        -----
        No more requests are on their way than ``max_queue`` allows to wait. Where
        others fill the queue, it waits until they do not.
        """
        from daskinfer.imap.results import Imap

        return Imap(
            self._job("imap", iterable, ordered, max_in_flight, on_error, kwargs)
        )

    def aimap(
        self,
        iterable: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = True,
        max_in_flight: int | str = "auto",
        on_error: str = "raise",
        **kwargs: Any,
    ) -> AsyncImap:
        """As :meth:`imap`, for ``async for``; takes async iterables as well.

        Works with every client, on any event loop. An async iterable is read by a task
        of its own on the loop that this is called on.
        """
        from daskinfer.imap.results import AsyncImap

        return AsyncImap(
            self._job("aimap", iterable, ordered, max_in_flight, on_error, kwargs)
        )

    def _bound(self) -> tuple[Model, CallOptions]:
        """The handle, and the options of its calls."""
        raise NotImplementedError

    def _job(
        self,
        method: str,
        iterable: Any,
        ordered: bool,
        max_in_flight: int | str,
        on_error: str,
        kwargs: dict[str, Any],
    ) -> Job:
        from daskinfer.imap import sources
        from daskinfer.imap.results import Job

        model, options = self._bound()
        client = model.client
        if method == "imap" and client.asynchronous:
            raise RuntimeError("an asynchronous client cannot wait here; use aimap")
        if options.key is not None:
            raise ValueError(f"key= names one result; {method} sends many requests")
        if not isinstance(ordered, bool):
            raise TypeError(f"ordered must be True or False, not {ordered!r}")
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', not {on_error!r}")
        sources.check(iterable, allows_async=method == "aimap")
        return Job(
            client=client,
            model=model,
            options=options,
            kwargs=kwargs,
            inputs=iterable,
            ordered=ordered,
            given=_limit(max_in_flight),
            returns_errors=on_error == "return",
        )


def _limit(max_in_flight: object) -> int | None:
    if isinstance(max_in_flight, str):
        if max_in_flight != "auto":
            raise ValueError(
                f'max_in_flight must be "auto" or an integer, not {max_in_flight!r}'
            )
        return None
    return size("max_in_flight", max_in_flight)
